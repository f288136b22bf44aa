"""DeepSeek sparse attention: attention to the keys that an indexer has chosen for each query.

No mask of all queries and keys is made. Queries are computed in blocks whose intermediate results take no more than
``BLOCK_BYTES``. Products are in the dtype of autocast where it is enabled, and sums in float32 as elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common.arguments import narrowed
from .._common.autocast import without_autocast
from .._common.second_order import differentiable_once
from ..attention_spec import Band
from ..masks.mask_description import MaskDescription
from ..ops.limits import INTEGERS, in_autocast_dtype, reads_chosen_in_place
from ..ops.reference import masked_out_by_band, softmax_with_sink
from ..varlen.varlen_batch import VarlenBatch

BLOCK_BYTES = 2**28  # of the intermediate results of a block of queries
ABSENT = -1  # in place of an index where there are fewer keys than are to be chosen


def attend_chosen(
    query: Tensor,
    latents: Tensor,
    rope: Tensor,
    indices: Tensor,
    mask: MaskDescription | Tensor,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute MLA's attention of all heads to chosen latents, which are both keys and values.

    Args:
        query: ``[B, S_q, N, R + R_r]``.
        latents: ``[B, S_k, R]``.
        rope: ``[B, S_k, R_r]``.
        indices: ``[B, S_q, k]``, the chosen keys of a query. Those that it sees are distinct, and stand first.
        mask: which keys a query sees, as that of :func:`top_k_keys`.
        scale: the factor of the scores.
        sink: ``[N]``, one more score for each query of a head.

    Returns:
        ``[B, S_q, N, R]``. A query that sees no key gives zero. It is differentiable once, but for the mask.

    Raises:
        ValueError: shapes or dtypes do not fit.
        TypeError: the query is not floating point, or indices are not integers.
    """
    query, latents, rope = in_autocast_dtype(query, latents, rope)
    _check(query, latents, rope, indices, sink)
    query, latents, rope = (narrowed(tensor) for tensor in (query, latents, rope))  # type: ignore[assignment]
    sink = None if sink is None else sink.float()
    is_trained = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, latents, rope, sink)
    )
    is_added = isinstance(mask, Tensor) and mask.is_floating_point()
    if sink is None and not is_trained and not is_added and reads_chosen_in_place(query, latents, rope):
        return _fused_sparse_attention(query, latents, rope, indices, mask, scale)
    with without_autocast(query):
        return SparseAttention.apply(query, latents, rope, sink, indices, mask, scale)


def _check(query: Tensor, latents: Tensor, rope: Tensor, indices: Tensor, sink: Tensor | None) -> None:
    """Raise what :func:`attend_chosen` says of tensors that do not fit."""
    if not query.is_floating_point():
        raise TypeError(f"attend_chosen: query must be floating point, got {query.dtype}")
    if indices.dtype not in INTEGERS:
        raise TypeError(f"attend_chosen: indices must be integers, got {indices.dtype}")
    if not query.dtype == latents.dtype == rope.dtype:
        found = f"{query.dtype}, {latents.dtype} and {rope.dtype}"
        raise ValueError(f"attend_chosen: query, latents and rope must have one dtype, got {found}")
    fits = (
        query.dim() == 4
        and latents.dim() == rope.dim() == indices.dim() == 3
        and latents.shape[:2] == rope.shape[:2]
        and query.shape[3] == latents.shape[2] + rope.shape[2]
        and query.shape[:2] == indices.shape[:2]
        and query.shape[0] == latents.shape[0]
        and (sink is None or sink.shape == query.shape[2:3])
    )
    if not fits:
        shapes = [None if x is None else list(x.shape) for x in (query, latents, rope, indices, sink)]
        raise ValueError(
            "attend_chosen: query [B, S_q, N, R + R_r], latents [B, S_k, R], rope [B, S_k, R_r], indices [B, S_q, k] "
            f"and sink [N] have to fit, got {', '.join(map(str, shapes))}"
        )


def masked_out_unchosen(
    indices: Tensor,
    masking: Band | VarlenBatch | Tensor,
    mask: Any,
    keys: int,
    sequences: tuple[Tensor, Tensor] | None,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of queries, each with a mask of the keys that were not chosen or that the queries do not see.

    Args:
        indices: ``[B, S_q, k]``, the chosen keys of a query.
        masking: a mask, ``[B or 1, N or 1, S_q, S_k]``, True where a key is masked out; or else a band, or packed
            sequences that ``mask`` describes.
        mask: the mask of the call. If it is a description, it counts unless ``masking`` is a mask.
        keys: the number of keys.
        sequences: the index of the sequence of each query and of each key, ``[B, 1, tokens]``; None for one sequence.
    """
    batch, queries, _ = indices.shape
    is_described = isinstance(mask, MaskDescription) and not isinstance(masking, Tensor)
    if isinstance(masking, Band) and not is_described:
        masking = masked_out_by_band(masking, queries, keys, indices.device)
    for begin, end in blocks_in_budget(queries, batch * keys):
        block = slice(begin, end)
        # uint8: CANN scatters bool on an AI CPU (ops-nn, scatter_elements.cpp, AICORE_910B_DTYPE_SUPPORT_LIST)
        masked_out = torch.ones(batch, end - begin, keys, dtype=torch.uint8, device=indices.device)
        masked_out = masked_out.scatter_(-1, indices[:, block].long(), 0).bool().unsqueeze(1)
        if is_described:
            masked_out = masked_out | ~mask.mask_slice(begin, end)[..., :keys].to(indices.device)
        elif masking is not None:
            masked_out = masked_out | masking[..., block, :]
        if sequences is not None:
            masked_out = masked_out | (sequences[0][..., block].unsqueeze(-1) != sequences[1].unsqueeze(-2))
        yield block, masked_out


class _QueryBlock(NamedTuple):
    """Holds a block of queries and their chosen keys, ``T`` queries in the whole batch."""

    queries: slice
    flat_indices: Tensor  # [T · k], into [B · S_k]
    keys: Tensor  # [T, k, R + R_r]
    query: Tensor  # [T, N, R + R_r]
    weights: Tensor  # [T, N, k], float32


class SparseAttention(torch.autograd.Function):
    """Gathers the chosen keys of a block of queries at a time, and again in the backward: it saves none of them.

    ``apply(query, latents, rope, sink, indices, mask, scale)`` takes the arguments of ``attend_chosen``.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, latents: Tensor, rope: Tensor, sink: Tensor | None, *rest: Any) -> Tensor:
        rank = latents.shape[-1]
        out = query.new_empty(*query.shape[:3], rank)
        for block in _query_blocks(query, latents, rope, sink, *rest):
            found = block.weights.to(query.dtype) @ block.keys[..., :rank]
            out[:, block.queries] = found.view_as(out[:, block.queries])
        ctx.save_for_backward(query, latents, rope, sink, rest[0], out)
        ctx.rest = rest[1:]
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, saved: tuple[Tensor | None, ...], gradient: Tensor) -> tuple[Tensor | None, ...]:
        with without_autocast(gradient):
            return *_gradients(gradient, *saved, *ctx.rest), None, None, None


def _gradients(
    gradient: Tensor,
    query: Tensor,
    latents: Tensor,
    rope: Tensor,
    sink: Tensor | None,
    indices: Tensor,
    out: Tensor,
    mask: Any,
    scale: float,
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of query, latents, rope and sink."""
    rank, dtype = latents.shape[-1], query.dtype
    d_query = torch.empty_like(query)
    d_keys = torch.zeros(latents.shape[0] * latents.shape[1], query.shape[-1], device=query.device)
    d_sink = None if sink is None else torch.zeros(len(sink), device=query.device)
    for block in _query_blocks(query, latents, rope, sink, indices, mask, scale):
        grad = gradient[:, block.queries].flatten(0, 1)
        mean = (grad.float() * out[:, block.queries].flatten(0, 1)).sum(-1, keepdim=True)
        d_scores = (grad @ block.keys[..., :rank].mT).float().sub_(mean).mul_(block.weights)
        if d_sink is not None:
            d_sink -= ((1 - block.weights.sum(-1)) * mean.squeeze(-1)).sum(0)
        d_scores = d_scores.mul_(scale).to(dtype)
        d_query[:, block.queries] = (d_scores @ block.keys).view_as(d_query[:, block.queries])
        added = d_scores.mT @ block.query
        added[..., :rank] += block.weights.to(dtype).mT @ grad
        d_keys.index_add_(0, block.flat_indices, added.flatten(0, 1).float())
    d_keys = d_keys.view(*latents.shape[:2], query.shape[-1]).to(dtype)
    d_sink = None if d_sink is None else d_sink.to(sink.dtype)
    return d_query, d_keys[..., :rank], d_keys[..., rank:], d_sink


def _query_blocks(
    query: Tensor, latents: Tensor, rope: Tensor, sink: Tensor | None, indices: Tensor, mask: Any, scale: float
) -> Iterator[_QueryBlock]:
    """Gather the keys and compute the weights of one block of queries after the other."""
    batch, queries, heads, size = query.shape
    keys, count = latents.shape[1], indices.shape[-1]
    first = torch.arange(batch, device=query.device).view(-1, 1, 1) * keys
    latents, rope = latents.flatten(0, 1), rope.flatten(0, 1)
    query_bytes = count * (size * (2 * query.element_size() + 4) + heads * (query.element_size() + 8))
    for begin, end in blocks_in_budget(queries, batch * query_bytes):
        chosen = indices[:, begin:end].long()
        flat_indices = (chosen + first).flatten()
        gathered = torch.cat((latents.index_select(0, flat_indices), rope.index_select(0, flat_indices)), dim=-1)
        gathered = gathered.view(batch * chosen.shape[1], count, gathered.shape[1])
        block_query = query[:, begin:end].flatten(0, 1)
        scores = (block_query.float() @ gathered.float().mT).mul_(
            scale
        )  # rounded to 16 bits they are further from float64
        block_mask = gather_mask(mask_slice(mask, begin, end, query), chosen).flatten(0, 1)
        weights = softmax_with_sink(mask_scores(scores, block_mask.unsqueeze(1)).unsqueeze(2), sink).squeeze(2)
        yield _QueryBlock(slice(begin, end), flat_indices, gathered, block_query, weights)


def _fused_sparse_attention(
    query: Tensor, latents: Tensor, rope: Tensor, indices: Tensor, mask: Any, scale: float
) -> Tensor:
    """Launch ``npu_sparse_flash_attention``. It takes no mask: the index of a key that is masked out becomes absent."""
    rank = latents.shape[-1]
    is_causal = isinstance(mask, MaskDescription) and mask.is_causal(query.shape[1], latents.shape[1])
    sees_no_key = None
    if not is_causal:
        is_visible = _visible_chosen(mask, indices)
        sees_no_key = ~is_visible.any(-1)[..., None, None]
        indices = torch.where(is_visible, indices, ABSENT)
    key = latents.unsqueeze(2).contiguous()
    out = torch.ops.npu.npu_sparse_flash_attention(
        query[..., :rank].contiguous(),
        key,
        key,
        indices.int().unsqueeze(2).contiguous(),
        scale,
        query_rope=query[..., rank:].contiguous(),
        key_rope=rope.unsqueeze(2).contiguous(),
        sparse_mode=3 if is_causal else 0,
        attention_mode=2,
    )[0]
    return out if sees_no_key is None else out.masked_fill(sees_no_key, 0)


def _visible_chosen(mask: MaskDescription | Tensor, indices: Tensor) -> Tensor:
    """Return which of the chosen keys a query sees, bool ``[B, S_q, k]``."""
    parts = []
    for begin, end in blocks_in_budget(indices.shape[1], 4 * len(indices) * indices.shape[-1]):
        chosen = indices[:, begin:end].long()
        parts.append(gather_mask(mask_slice(mask, begin, end, chosen), chosen))
    return torch.cat(parts, dim=1)


def gather_mask(mask: Tensor, chosen: Tensor) -> Tensor:
    """Gather a mask, ``[B or 1, T, S_k]``, at chosen keys, ``[B, T, k]``.

    A bool one is gathered in float16: CANN gathers bool, and much of uint8, on an AI CPU (ops-nn, gather_elements.cpp).
    """
    is_bool = mask.dtype == torch.bool
    found = (mask.half() if is_bool else mask).expand(len(chosen), -1, -1).gather(-1, chosen)
    return found.bool() if is_bool else found


def blocks_in_budget(queries: int, query_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield where blocks of queries begin and end, each within ``BLOCK_BYTES`` if a query takes ``query_bytes``."""
    size = max(1, BLOCK_BYTES // max(1, query_bytes))
    for begin in range(0, queries, size):
        yield begin, min(begin + size, queries)


def mask_slice(mask: MaskDescription | Tensor, begin: int, end: int, like: Tensor) -> Tensor:
    """Return the mask of some queries without heads, ``[B or 1, end - begin, S_k]``, on the device of ``like``."""
    part = mask.mask_slice(begin, end) if isinstance(mask, MaskDescription) else mask[..., begin:end, :]
    return (part[:, 0] if part.dim() == 4 else part).to(like.device)


def mask_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """Return scores that are minus infinity where a bool mask is False, or to which a floating one is added."""
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
