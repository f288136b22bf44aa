"""What the functions of this package refuse, and how they say so."""

from __future__ import annotations

import torch
from torch import Tensor

_INDEX_DTYPES = (torch.int32, torch.int64)
_FLOATING = ("hidden_states", "top_k_weights", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")


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

    ``halves`` says that the gate makes one column of two. Every forward asks: each attribute of a tensor is read once.
    """
    name = "fused_experts"
    shape, index_shape, weights_shape, gate_up_shape, down_shape = (
        x.shape, index.shape, weights.shape, gate_up.shape, down.shape,
    )  # fmt: skip
    if x.dim() != 2:
        raise ValueError(f"{name}: hidden_states must be [T, H], got {list(shape)}: reshape(-1, H) it")
    tokens, size = shape
    if index.dim() != 2 or index_shape != weights_shape or index_shape[0] != tokens:
        raise ValueError(
            f"{name}: top_k_index and top_k_weights must both be [T, k] with T = {tokens}, got {list(index_shape)} "
            f"and {list(weights_shape)}"
        )
    if index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"{name}: top_k_index must be int64 or int32, got {index.dtype}")
    floating = (x, weights, gate_up, down, *biases)
    dtypes = [None if tensor is None else tensor.dtype for tensor in floating]
    for what, dtype in zip(_FLOATING, dtypes):
        if dtype is not None and not dtype.is_floating_point:
            raise TypeError(f"{name}: {what} must be floating point, got {dtype}")
    if dtypes[2] != dtypes[3]:
        raise TypeError(f"{name}: gate_up_proj and down_proj must have one dtype, got {dtypes[2]} and {dtypes[3]}")
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up_shape[0] != down_shape[0]:
        raise ValueError(
            f"{name}: gate_up_proj and down_proj must be three-dimensional and of as many experts, got "
            f"{list(gate_up_shape)} and {list(down_shape)}"
        )
    (experts, inputs, inner), (_, gated, outputs) = gate_up_shape, down_shape
    fits = 2 * gated == inner or (not halves and gated == inner)
    if not (size == inputs == outputs and fits):
        raise ValueError(
            f"{name}: for hidden_states {list(shape)} and {experts} experts gate_up_proj must be [{experts}, 2·I, "
            f"{size}] and down_proj [{experts}, {size}, I], or with is_transposed=True their last two "
            f"dimensions the other way around; got {list(gate_up.mT.shape)} and {list(down.mT.shape)} in that order"
        )
    for what, bias, columns in zip(_FLOATING[4:], biases, (inner, outputs)):
        if bias is not None and bias.shape != (experts, columns):
            raise ValueError(f"{name}: {what} must be [{experts}, {columns}], got {list(bias.shape)}")
    device = index.device
    for tensor in floating:
        if tensor is not None and tensor.device != device:
            _check_devices(name, top_k_index=index, **dict(zip(_FLOATING, floating)))


def check_indices(index: Tensor, last: int) -> None:
    """Raise if an index on the host is not from 0 to ``last``. For one on the device the host would have to wait."""
    if index.device.type == "cpu" and index.numel() and not 0 <= index.min() <= index.max() <= last:
        raise ValueError(f"fused_experts: top_k_index must be from 0 to {last}, got {index.min()} to {index.max()}")


def _check_devices(name: str, **tensors: Tensor | None) -> None:
    """Raise if the tensors, by their names as arguments of the function ``name``, are on several devices."""
    devices = {what: tensor.device for what, tensor in tensors.items() if tensor is not None}
    if len(set(devices.values())) > 1:
        raise ValueError(f"{name}: all tensors must be on one device, got {devices}")
