"""q and k of one token a sequence, as a step of decoding has them, rotated together in one launch.

``npu_mrope`` takes both, and leaves them as they are, which ``npu_apply_rotary_pos_emb`` does not: it writes to them,
and whoever has kept what a projection returned would find it rotated. It computes in float32 and rounds once, as
``npu_rotary_mul`` does: CANN's ops-transformer, posembedding/rope_with_sin_cos_cache/op_kernel. It has no derivative.

The operator looks cos and sin up in a table of halves, which is made of them once for all layers. It is kept as long as
cos lives, as a copy: so only of a cos that was made while a graph was captured, or not, as it is used, since a replay
writes to what was captured, and to nothing else. It is no attribute of cos: who saves a tensor saves what it holds.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._common.cann import CANN
from ._common.captures import capturing
from ._common.derivatives import needs_grad
from ._common.distributed import is_distributed
from .limits import DTYPES

Pair = tuple[Tensor, Tensor]
_MAX_HEAD_SIZE, _HEAD_BYTES_MULTIPLE = 128, 64
# float32 values that a token fills, in head sizes: for each head, and besides; from CANN 9.0 on any number fits
_FLOATS_PER_HEAD, _FLOATS_PER_TOKEN = (9, 0) if CANN < (8, 5) else (7, 10) if CANN < (9, 0) else (0, 0)
_LOCAL_MEMORY = 192 * 1024  # bytes of a vector core, Atlas A2 and A3


@dataclass(eq=False)
class _CosSin:
    """Holds a cos for one token with its sin, and the table that the operator looks them up in."""

    until: weakref.ref[Tensor]  # cos dies
    sin: Tensor
    in_graph: bool  # whether a graph makes them
    times: int  # how often each angle is in them
    key: Any = None  # what the table is for
    table: tuple[Tensor, Tensor] | None = None


_noted: dict[int, _CosSin] = {}  # by the id of a cos, until it dies


def note_cos_sin(cos: Tensor, sin: Tensor, times: int) -> None:
    """Note how often cos and sin, ``[B, 1, D]`` or ``[B, 1, D/2]``, hold each angle, and whether a graph makes them."""
    if not torch.compiler.is_compiling():
        number = id(cos)
        _noted[number] = _CosSin(
            weakref.ref(cos, lambda _, noted=_noted: noted.pop(number, None)), sin, capturing(), times
        )


def rotate_one_token(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Pair | None:
    """Rotate q and k where no gradient is needed; None where one is, or the operator does not take them.

    Args:
        q: ``[B, N, 1, D]``, or ``[B, 1, N, D]`` with unsqueeze_dim 2.
        k: likewise.
        cos: ``[B or 1, 1, D or D/2]``, as its maker noted it.
        sin: likewise.
        unsqueeze_dim: where cos and sin would get the dimension of the heads.
    """
    noted = _noted.get(id(cos))
    if noted is None or noted.sin is not sin or noted.in_graph is not capturing() or cos.is_inference():
        return None
    if needs_grad(q, k, cos, sin):
        return None
    layouts = type(q), q.shape, k.shape, q.stride(), k.stride(), q.dtype, k.dtype, q.device
    key = (*layouts, unsqueeze_dim, cos._version, sin._version)
    if noted.key != key:
        noted.key, noted.table = key, _half_tables(q, k, cos, sin, unsqueeze_dim, noted.times)
    if noted.table is None:
        return None
    positions, table = noted.table
    batch = q.shape[0]
    rotated = torch.ops.npu.npu_mrope(positions, q.view(batch, -1), k.view(batch, -1), table, q.shape[-1])
    return rotated[0].view(q.shape), rotated[1].view(k.shape)


def _half_tables(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, times: int
) -> tuple[Tensor, Tensor] | None:
    """Return which row of a table each sequence has, ``[B]``, and the table, ``[B or 1, D]``: halves of cos and sin."""
    if not _fits(q, k, cos, sin, unsqueeze_dim, times):
        return None
    rows, half = cos.shape[0], q.shape[-1] // 2
    batch, device = q.shape[0], q.device
    positions = torch.arange(batch, device=device) if rows == batch else torch.zeros(batch, dtype=int, device=device)
    return positions, torch.cat((cos[:, 0, :half], sin[:, 0, :half]), -1)


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, times: int) -> bool:
    """Tell whether ``npu_mrope`` takes them (Atlas A2 and A3): op-plugin, docs/zh/custom_APIs/torch_npu."""
    dtype, device, size = q.dtype, q.device, q.shape[-1]
    width = size // 2 * times
    return (
        unsqueeze_dim in (1, 2)
        and device.type == "npu"
        and dtype in DTYPES
        and dtype is k.dtype is cos.dtype is sin.dtype
        and device == k.device == cos.device == sin.device
        and q.dim() == k.dim() == 4
        and size == k.shape[-1] <= _MAX_HEAD_SIZE
        and size * q.element_size() % _HEAD_BYTES_MULTIPLE == 0
        and cos.shape == sin.shape in {(1, 1, width), (q.shape[0], 1, width)}
        and q.shape[0] == k.shape[0]
        and q.shape[3 - unsqueeze_dim] == k.shape[3 - unsqueeze_dim] == 1
        and _fits_heads(max(q.shape[unsqueeze_dim], k.shape[unsqueeze_dim]), size)
        and _are_rows(q, unsqueeze_dim)
        and _are_rows(k, unsqueeze_dim)
        and not is_distributed(q, k, cos, sin)
    )


def _fits_heads(heads: int, size: int) -> bool:
    """Tell whether a token fits into local memory: the operator's tiling divides by how many do, before CANN 9.0.

    CANN's ops-transformer, posembedding/rope_with_sin_cos_cache/op_host/rope_with_sin_cos_cache_tiling.cpp,
    ``maxNPerLoopForUb``: of 8.5.0 lines 166 to 174, of 9.0.0 line 257, and before 8.5 as in November 2025.
    """
    return 4 * size * (_FLOATS_PER_HEAD * heads + _FLOATS_PER_TOKEN) <= _LOCAL_MEMORY


def _are_rows(x: Tensor, unsqueeze_dim: int) -> bool:
    """Tell whether the heads of each sequence lie one behind the other."""
    heads = x.shape[unsqueeze_dim]
    return x.numel() > 0 and x.stride(3) == 1 and (heads == 1 or x.stride(unsqueeze_dim) == x.shape[3])
