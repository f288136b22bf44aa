"""Mixtures of experts as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import grouped as _grouped
from . import routing
from .gates import SWIGLU, Activation, Gate
from .grouped import GmmFunction
from .reference import experts_in_torch, product_in_torch
from .training import FusedExperts

_INDEX_DTYPES = (torch.int32, torch.int64)


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x[r] @ weight[e] + bias[e]`` for the rows of each group, one group after the other. Differentiable.

    One launch of ``npu_grouped_matmul``, two for a gradient. What that does not take (more than 1024 groups, last
    dimensions of 65536 and more, other dtypes, weights that are neither contiguous nor a transposed view, the CPU) is
    computed group by group in torch, for which the host waits for ``counts``.

    Args:
        x: ``[M, K]``, float16, bfloat16 or float32.
        weight: ``[E, K, N]``, of the dtype of ``x``.
        counts: the rows of each group, int64 ``[E]``, on the device of ``x``; they must add up to M, which is not
            checked on the NPU.
        bias: ``[E, N]``.

    Returns:
        ``[M, N]``.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: dtypes do not.
    """
    _check_product(x, weight, counts, bias)
    if not _grouped.fits(x, weight):
        return product_in_torch(x, weight, counts, bias)
    return GmmFunction.apply(x.contiguous(), weight, counts, bias, None)


def fused_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: Activation = SWIGLU,
    is_transposed: bool = False,
    is_expert_parallel: bool = False,
    post_expert_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The experts of a mixture on the tokens that a router sent to them, weighed and summed. Differentiable.

    transformers, integrations/moe.py, grouped_mm_experts_forward. On the NPU: permute, product, activation, product,
    unpermute, without waiting for the device; the gradient of a :class:`Gate` keeps what training.py says. What the
    operators do not take (more than 1024 experts, 512 choices or 2^24 rows, last dimensions of 65536 and more, other
    dtypes, the CPU) is computed expert by expert in torch, for which the host waits for how many rows each gets.

    Args:
        hidden_states: ``[T, H]``. Computed with in the dtype of the weights, and given back in its own.
        top_k_index: int64 or int32 ``[T, k]``, from 0 to E - 1. Checked on the CPU only.
        top_k_weights: ``[T, k]``, of any floating dtype.
        gate_up_proj: ``[E, 2·I, H]``; ``[E, I, H]`` where ``activation`` does not gate.
        down_proj: ``[E, H, I]``.
        gate_up_proj_bias: ``[E, 2·I]``.
        down_proj_bias: ``[E, H]``.
        activation: from the first product to what the second is computed of: a :class:`Gate`, or any function of rows.
        is_transposed: the weights are ``[E, H, 2·I]`` and ``[E, I, H]``.
        is_expert_parallel: ``top_k_index`` may be E, for an expert that lives elsewhere: such a choice adds nothing and
            has no gradient.
        post_expert_norm: a function of the rows that the second product gives.

    Returns:
        ``[T, H]``.

    Raises:
        ValueError: shapes or devices do not fit, or an index on the CPU is out of range.
        TypeError: dtypes do not.
    """
    gate_up, down = (w if is_transposed else w.mT for w in (gate_up_proj, down_proj))
    _check_experts(hidden_states, top_k_index, top_k_weights, gate_up, down, gate_up_proj_bias, down_proj_bias)
    _check_indices(top_k_index, down.shape[0] if is_expert_parallel else down.shape[0] - 1)
    x = hidden_states.to(gate_up.dtype)
    routed = (x, top_k_index, top_k_weights)
    parameters = (gate_up, down, gate_up_proj_bias, down_proj_bias)
    if not (_grouped.fits(x, gate_up, down) and routing.fits(top_k_index)):
        y = experts_in_torch(*routed, *parameters, activation, post_expert_norm)
    else:
        x, top_k_index, top_k_weights = (tensor.contiguous() for tensor in routed)
        if post_expert_norm is None and isinstance(activation, Gate) and activation.fits(gate_up.shape[-1], x.dtype):
            y = FusedExperts.apply(activation, x, top_k_index, top_k_weights, *parameters, is_expert_parallel)
        else:
            rows, order = routing.Permute.apply(x, top_k_index)
            counts = routing.count(top_k_index, down.shape[0])
            tail = routing.rows_after(counts, rows.shape[0]) if is_expert_parallel else None
            rows = activation(GmmFunction.apply(rows, gate_up, counts, gate_up_proj_bias, tail))
            rows = GmmFunction.apply(rows.contiguous(), down, counts, down_proj_bias, tail)
            rows = rows if post_expert_norm is None else post_expert_norm(rows)
            y = routing.Unpermute.apply(rows.contiguous(), order, top_k_weights, top_k_index)
    return y.to(hidden_states.dtype)


def _check_product(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"grouped_matmul: x must be [M, K] and weight [E, K, N], got {list(x.shape)} and {list(weight.shape)}"
        )
    groups, _, size = weight.shape
    if list(counts.shape) != [groups] or (bias is not None and list(bias.shape) != [groups, size]):
        shapes = [list(counts.shape), bias if bias is None else list(bias.shape)]
        raise ValueError(
            f"grouped_matmul: for weight {list(weight.shape)} counts must be [{groups}] and bias [{groups}, {size}], "
            f"got {shapes[0]} and {shapes[1]}"
        )
    if counts.dtype is not torch.int64:
        raise TypeError(f"grouped_matmul: counts must be int64, got {counts.dtype}")
    if not x.is_floating_point() or x.dtype != weight.dtype:
        raise TypeError(f"grouped_matmul: x and weight must have one floating dtype, got {x.dtype} and {weight.dtype}")
    _check_devices("grouped_matmul", x=x, weight=weight, counts=counts, bias=bias)


def _check_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor | None
) -> None:
    name = "fused_experts"
    if x.dim() != 2:
        raise ValueError(f"{name}: hidden_states must be [T, H], got {list(x.shape)}: reshape(-1, H) it")
    if index.dim() != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
        raise ValueError(
            f"{name}: top_k_index and top_k_weights must both be [T, k] with T = {x.shape[0]}, got {list(index.shape)} "
            f"and {list(weights.shape)}"
        )
    if index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: top_k_index must be int64 or int32, got {index.dtype}")
    if not (x.is_floating_point() and weights.is_floating_point()):
        raise TypeError(
            f"{name}: hidden_states and top_k_weights must be floating point, got {x.dtype}, {weights.dtype}"
        )
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape[0] != down.shape[0] or gate_up.dtype != down.dtype:
        raise ValueError(
            f"{name}: gate_up_proj and down_proj must be three-dimensional, of as many experts and one dtype, got "
            f"{list(gate_up.shape)} {gate_up.dtype} and {list(down.shape)} {down.dtype}"
        )
    experts, size, inner = gate_up.shape
    if (size, size) != (x.shape[1], down.shape[2]) or down.shape[1] not in (inner, inner / 2):
        raise ValueError(
            f"{name}: for hidden_states {list(x.shape)} and {experts} experts gate_up_proj must be [{experts}, 2·I, "
            f"{x.shape[1]}] and down_proj [{experts}, {x.shape[1]}, I], or with is_transposed=True their last two "
            f"dimensions the other way around; got {list(gate_up.mT.shape)} and {list(down.mT.shape)} in that order"
        )
    for what, bias, outputs in zip(("gate_up_proj_bias", "down_proj_bias"), biases, (inner, down.shape[2])):
        if bias is not None and list(bias.shape) != [experts, outputs]:
            raise ValueError(f"{name}: {what} must be [{experts}, {outputs}], got {list(bias.shape)}")
    _check_devices(
        name, hidden_states=x, top_k_index=index, top_k_weights=weights, gate_up_proj=gate_up, down_proj=down
    )


def _check_indices(index: Tensor, last: int) -> None:
    """On the host only: on the device it would have to wait."""
    if index.device.type == "cpu" and index.numel() and not 0 <= index.min() <= index.max() <= last:
        raise ValueError(f"fused_experts: top_k_index must be from 0 to {last}, got {index.min()} to {index.max()}")


def _check_devices(name: str, **tensors: Tensor | None) -> None:
    devices = {what: tensor.device for what, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{name}: all tensors must be on one device, got {devices}")
