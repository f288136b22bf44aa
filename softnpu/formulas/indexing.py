"""Define operators that write or choose by an index: one-hot rows, updates by index, and the filter of a sampler.

op-plugin, docs/zh/custom_APIs/torch_npu, the pages of the operators; of npu_one_hot op_plugin/ops/aclops/OnehotNpu.cpp,
of npu_top_k_top_p test/test_custom_ops/test_npu_top_k_top_p.py. Of scatter_update CANN's ops-nn,
index/scatter/docs/aclnnInplaceScatterUpdate.md and op_graph/scatter_proto.h.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, float16, float32, int8, int32, int64

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes, require_values
from softnpu.formulas import formula

UPDATED = (float32, float16, torch.bool, bfloat16, int64, int8)
CACHED = (int8, float16, float32, bfloat16, int32)
MOST_K = 1024


@formula
def npu_one_hot(
    input: Tensor, num_classes: int = -1, depth: int = 1, on_value: float = 1, off_value: float = 0
) -> Tensor:
    """Return float32 [..., depth] with on_value where the class of the last axis is; classes beyond are nowhere."""
    operator = "npu_one_hot"
    require_dtypes(operator, {(int32,), (int64,)}, input=input)
    require(depth >= 1, operator, f"depth must be positive, got {depth}")
    require(num_classes == -1, operator, "num_classes, the axis, must be -1: the result is allocated for the last axis")
    chosen = input.unsqueeze(-1) == torch.arange(depth)
    return torch.where(chosen, float(on_value), float(off_value)).float()


@formula
def npu_scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Return a copy of input with ``input[indices[..., 0], indices[..., 1], ...] = updates``."""
    return _updated("npu_scatter_nd_update", input.clone(memory_format=torch.contiguous_format), indices, updates)


@formula
def npu_scatter_nd_update_(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    """Compute npu_scatter_nd_update in place."""
    return _updated("npu_scatter_nd_update_", input, indices, updates)


@formula
def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Return a copy of input with updates in it, which scatter_update_ writes in place."""
    return _put_at("scatter_update", input.clone(memory_format=torch.contiguous_format), indices, updates, axis)


@formula
def scatter_update_(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    """Write updates[i] along an axis into input[i], from indices[i] on; for a pair [j, k] into input[j], from k on."""
    return _put_at("scatter_update_", input, indices, updates, axis)


@formula
def npu_top_k_top_p(logits: Tensor, p: Tensor | None = None, k: Tensor | None = None) -> Tensor:
    """Set logits [B, V] to -inf that are below the k-th largest, or outside of the largest with the probability p.

    p [B] has the dtype of the logits and lies in [0, 1], k [B] is int32 in [1, 1024]. The largest is always kept.
    Logits that are as large as the k-th are kept too.
    """
    operator = "npu_top_k_top_p"
    require_dtypes(operator, {(d,) for d in FLOATING}, logits=logits)
    require(logits.dim() == 2, operator, f"logits must be [B, V], got {describe(logits)}")
    require(p is not None or k is not None, operator, "p, k or both are needed")
    rows, words = logits.shape
    values, order = logits.sort(dim=-1, stable=True)
    if k is not None:
        require(k.dtype == int32 and k.shape == (rows,), operator, f"k must be int32 [{rows}], got {describe(k)}")
        most = min(MOST_K, words)
        require_values(bool(((k >= 1) & (k <= most)).all()), operator, f"k must be in [1, {most}]")
        values = values.masked_fill(values < values.gather(1, words - k.long().unsqueeze(-1)), -torch.inf)
    if p is not None:
        fits = p.dtype == logits.dtype and p.shape == (rows,)
        require(fits, operator, f"p must be {logits.dtype} [{rows}], got {describe(p)}")
        require_values(bool(((p >= 0) & (p <= 1)).all()), operator, "p must be in [0, 1]")
        dropped = torch.softmax(values.float(), -1).cumsum(-1) <= 1 - p.float().unsqueeze(-1)
        dropped[:, -1] = False
        values = values.masked_fill(dropped, -torch.inf)
    return torch.empty_like(values).scatter_(-1, order, values)


def _updated(operator: str, x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    require_dtypes(operator, {(d, d) for d in UPDATED}, input=x, updates=updates)
    require_dtypes(operator, {(int32,), (int64,)}, indices=indices)
    fits = 1 <= x.dim() <= 8 and indices.dim() >= 2 and 1 <= indices.shape[-1] <= x.dim()
    rule = f"indices must have two dimensions or more, the last at most {x.dim()}, got {describe(indices)}"
    require(fits, operator, rule)
    depth = indices.shape[-1]
    expected = (*indices.shape[:-1], *x.shape[depth:])
    require(updates.shape == expected, operator, f"updates must be {list(expected)}, got {describe(updates)}")
    inside = bool(((indices >= 0) & (indices < torch.tensor(x.shape[:depth]))).all())
    require(inside, operator, f"indices must be inside of {list(x.shape[:depth])}")
    x[indices.long().unbind(-1)] = updates
    return x


def _put_at(operator: str, data: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    require_dtypes(operator, {(d, d) for d in CACHED}, data=data, updates=updates)
    require_dtypes(operator, {(int32,), (int64,)}, indices=indices)
    require(data.numel() * indices.numel() * updates.numel() > 0, operator, "tensors must not be empty")
    fits = 2 <= data.dim() <= 8 and updates.dim() == data.dim()
    require(fits, operator, f"updates must have the 2 to 8 dimensions of data, got {describe(updates)}")
    require(-2 <= axis < data.dim() and axis % data.dim() != 0, operator, f"axis must be -1, -2 or above 0, got {axis}")
    axis %= data.dim()
    is_aligned = axis < data.dim() - 1 or data.shape[-1] * data.element_size() % 32 == 0
    require(is_aligned, operator, "the last axis must be a multiple of 32 bytes to be written to")
    pairs = indices.dim() == 2 and indices.shape[1] == 2
    rule = f"indices must be [{len(updates)}] or [{len(updates)}, 2], got {describe(indices)}"
    require(pairs or indices.dim() < 2, operator, rule)
    require((len(indices) if indices.dim() else 1) == len(updates) <= len(data), operator, rule)
    others = [size for place, size in enumerate(updates.shape) if place not in (0, axis)]
    expected = [size for place, size in enumerate(data.shape) if place not in (0, axis)]
    require(others == expected, operator, f"updates must be as data but for 0 and the axis, got {describe(updates)}")
    count = updates.shape[axis]
    for number, (place, update) in enumerate(zip(indices.reshape(len(updates), -1).tolist(), updates)):
        row, begin = place if pairs else (number, place[0])
        inside = 0 <= row < len(data) and 0 <= begin <= data.shape[axis] - count
        require_values(inside, operator, f"updates must be inside of {list(data.shape)}")
        data[row].narrow(axis - 1, begin, count).copy_(update)
    return data
