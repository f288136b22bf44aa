"""What the functions of this package refuse, and how they say so."""

from __future__ import annotations

import torch
from torch import Tensor

_INDEX_DTYPES = (torch.int32, torch.int64)


def check_product(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None) -> None:
    """Raise what :func:`fused_moe.grouped_matmul` says of its arguments."""
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
    if bias is not None and not bias.is_floating_point():
        raise TypeError(f"grouped_matmul: bias must be floating point, got {bias.dtype}")
    _check_devices("grouped_matmul", x=x, weight=weight, counts=counts, bias=bias)


def check_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor | None, halves: bool
) -> None:
    """Raise what :func:`fused_moe.fused_experts` says of its arguments, with weights ``[E, K, N]``.

    ``halves`` says that the gate makes one column of two.
    """
    if not _are_usual(x, index, weights, gate_up, down, *biases):
        _check_experts(x, index, weights, gate_up, down, *biases, halves=halves)


def _are_usual(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor | None
) -> bool:
    """Tell whether nothing is wrong with arguments as most models have them.

    Every forward asks: these are fewer steps than :func:`_check_experts` takes.
    """
    if not (x.dim() == index.dim() == 2 and gate_up.dim() == down.dim() == 3):
        return False
    (tokens, size), chosen, dtype, device = x.shape, index.shape, gate_up.dtype, x.device
    (experts, inputs, inner), (others, gated, outputs) = gate_up.shape, down.shape
    return (
        chosen == weights.shape
        and chosen[0] == tokens
        and size == inputs == outputs
        and experts == others
        and inner == 2 * gated
        and index.dtype in _INDEX_DTYPES
        and dtype is x.dtype is down.dtype
        and dtype.is_floating_point
        and weights.dtype.is_floating_point
        and device == index.device == weights.device == gate_up.device == down.device
        and all(bias is None for bias in biases)
    )


def _check_experts(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, *biases: Tensor | None, halves: bool
) -> None:
    """Look at one argument after the other, and raise a sentence about the first that does not fit."""
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
    named = {"hidden_states": x, "top_k_weights": weights, "gate_up_proj": gate_up, "down_proj": down}
    named |= dict(zip(("gate_up_proj_bias", "down_proj_bias"), biases))
    for what, tensor in named.items():
        if tensor is not None and not tensor.is_floating_point():
            raise TypeError(f"{name}: {what} must be floating point, got {tensor.dtype}")
    if gate_up.dtype != down.dtype:
        raise TypeError(f"{name}: gate_up_proj and down_proj must have one dtype, got {gate_up.dtype} and {down.dtype}")
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.shape[0] != down.shape[0]:
        raise ValueError(
            f"{name}: gate_up_proj and down_proj must be three-dimensional and of as many experts, got "
            f"{list(gate_up.shape)} and {list(down.shape)}"
        )
    experts, size, inner = gate_up.shape
    fits = 2 * down.shape[1] == inner or (not halves and down.shape[1] == inner)
    if (size, size) != (x.shape[1], down.shape[2]) or not fits:
        raise ValueError(
            f"{name}: for hidden_states {list(x.shape)} and {experts} experts gate_up_proj must be [{experts}, 2·I, "
            f"{x.shape[1]}] and down_proj [{experts}, {x.shape[1]}, I], or with is_transposed=True their last two "
            f"dimensions the other way around; got {list(gate_up.mT.shape)} and {list(down.mT.shape)} in that order"
        )
    for what, bias, outputs in zip(("gate_up_proj_bias", "down_proj_bias"), biases, (inner, down.shape[2])):
        if bias is not None and list(bias.shape) != [experts, outputs]:
            raise ValueError(f"{name}: {what} must be [{experts}, {outputs}], got {list(bias.shape)}")
    _check_devices(name, top_k_index=index, **named)


def check_indices(index: Tensor, last: int) -> None:
    """Raise if an index on the host is not from 0 to ``last``. For one on the device the host would have to wait."""
    if index.device.type == "cpu" and index.numel() and not 0 <= index.min() <= index.max() <= last:
        raise ValueError(f"fused_experts: top_k_index must be from 0 to {last}, got {index.min()} to {index.max()}")


def _check_devices(name: str, **tensors: Tensor | None) -> None:
    """Raise if the tensors, by their names as arguments of the function ``name``, are on several devices."""
    devices = {what: tensor.device for what, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{name}: all tensors must be on one device, got {devices}")
