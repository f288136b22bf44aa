"""Sparse attention as DeepSeek-V3.2 has it: attention to the keys that an indexer has chosen for each query.

No mask of all queries and keys is made: what is made for some queries at a time takes no more than `BYTES`, however
many there are. Products are in the dtype of autocast where it is enabled, and sums in float32 as elsewhere.
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
from ..ops.limits import INTEGERS, of_one_dtype, reads_chosen_in_place
from ..ops.reference import outside, softmax
from ..varlen.varlen_batch import Packing

BYTES = 2**28  # of what is made for some queries at a time
ABSENT = -1  # an index for which there is no key


def attend_chosen(
    query: Tensor,
    latents: Tensor,
    rope: Tensor,
    indices: Tensor,
    mask: MaskDescription | Tensor,
    scale: float,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute the attention of all heads to chosen keys of one head, whose first numbers are its values.

    Args:
        query: ``[B, S_q, N, R + R_r]``.
        latents: ``[B, S_k, R]``.
        rope: ``[B, S_k, R_r]``.
        indices: ``[B, S_q, k]``, the keys of a query; those that it sees are different ones, and stand first.
        mask: as that of `top_k_keys`: what it leaves out a query does not see.
        scale: the factor of the scores.
        sink: ``[N]``, one more score of every row of a head.

    Returns:
        ``[B, S_q, N, R]``. A query that sees no key gives zero. It is differentiable once, but for the mask.

    Raises:
        ValueError: shapes or dtypes do not fit.
        TypeError: the query is not floating point, or indices are not integers.
    """
    query, latents, rope = of_one_dtype(query, latents, rope)
    _check(query, latents, rope, indices, sink)
    query, latents, rope = (narrowed(tensor) for tensor in (query, latents, rope))  # type: ignore[assignment]
    sink = None if sink is None else sink.float()
    is_trained = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in (query, latents, rope, sink)
    )
    is_added = isinstance(mask, Tensor) and mask.is_floating_point()
    if sink is None and not is_trained and not is_added and reads_chosen_in_place(query, latents, rope):
        return _by_operator(query, latents, rope, indices, mask, scale)
    with without_autocast(query):
        return ChosenAttention.apply(query, latents, rope, sink, indices, mask, scale)


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


def left_out_beside(
    indices: Tensor, seen: Band | Packing | Tensor, mask: Any, keys: int, sequences: tuple[Tensor, Tensor] | None
) -> Iterator[tuple[slice, Tensor]]:
    """Yield some queries after the other, with what is left out for them: what was not chosen, or not seen.

    Args:
        indices: ``[B, S_q, k]``, the keys of a query.
        seen: which keys the queries see; what is left out, ``[B or 1, N or 1, S_q, S_k]``, or a band; unless it is the
            former, what `mask` says counts where that is a description.
        mask: of the call.
        keys: how many there are.
        sequences: which one each query is in, and each key, ``[B, 1, tokens]``: others are left out; None for one.
    """
    batch, queries, _ = indices.shape
    is_described = isinstance(mask, MaskDescription) and not isinstance(seen, Tensor)
    if isinstance(seen, Band) and not is_described:
        seen = outside(seen, queries, keys, indices.device)
    for begin, end in in_budget(queries, batch * keys):
        rows = slice(begin, end)
        # uint8: CANN scatters bool on an AI CPU (ops-nn, scatter_elements.cpp, AICORE_910B_DTYPE_SUPPORT_LIST)
        left_out = torch.ones(batch, end - begin, keys, dtype=torch.uint8, device=indices.device)
        left_out = left_out.scatter_(-1, indices[:, rows].long(), 0).bool().unsqueeze(1)
        if is_described:
            left_out = left_out | ~mask.of_queries(begin, end)[..., :keys].to(indices.device)
        elif seen is not None:
            left_out = left_out | seen[..., rows, :]
        if sequences is not None:
            left_out = left_out | (sequences[0][..., rows].unsqueeze(-1) != sequences[1].unsqueeze(-2))
        yield rows, left_out


class _Part(NamedTuple):
    """Holds what some queries need of their keys: ``[T, k, ...]`` for ``T = B · rows``."""

    rows: slice
    flat: Tensor  # the places of keys in [B · S_k], [T · k]
    keys: Tensor  # [T, k, R + R_r]
    query: Tensor  # [T, N, R + R_r]
    weights: Tensor  # [T, N, k], float32


class ChosenAttention(torch.autograd.Function):
    """Gathers the keys of some queries after the other, and again for the gradient: nothing is kept of them.

    ``apply(query, latents, rope, sink, indices, mask, scale)`` takes what `attend_chosen` takes.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, latents: Tensor, rope: Tensor, sink: Tensor | None, *rest: Any) -> Tensor:
        rank = latents.shape[-1]
        out = query.new_empty(*query.shape[:3], rank)
        for part in _with_chosen_keys(query, latents, rope, sink, *rest):
            found = part.weights.to(query.dtype) @ part.keys[..., :rank]
            out[:, part.rows] = found.view_as(out[:, part.rows])
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
    """Return the gradients of query, latents, rope and sink."""
    rank, dtype = latents.shape[-1], query.dtype
    of_query = torch.empty_like(query)
    of_keys = torch.zeros(latents.shape[0] * latents.shape[1], query.shape[-1], device=query.device)
    of_sink = None if sink is None else torch.zeros(len(sink), device=query.device)
    for part in _with_chosen_keys(query, latents, rope, sink, indices, mask, scale):
        grad = gradient[:, part.rows].flatten(0, 1)
        mean = (grad.float() * out[:, part.rows].flatten(0, 1)).sum(-1, keepdim=True)
        of_scores = (grad @ part.keys[..., :rank].mT).float().sub_(mean).mul_(part.weights)
        if of_sink is not None:
            of_sink -= ((1 - part.weights.sum(-1)) * mean.squeeze(-1)).sum(0)
        of_scores = of_scores.mul_(scale).to(dtype)
        of_query[:, part.rows] = (of_scores @ part.keys).view_as(of_query[:, part.rows])
        added = of_scores.mT @ part.query
        added[..., :rank] += part.weights.to(dtype).mT @ grad
        of_keys.index_add_(0, part.flat, added.flatten(0, 1).float())
    of_keys = of_keys.view(*latents.shape[:2], query.shape[-1]).to(dtype)
    of_sink = None if of_sink is None else of_sink.to(sink.dtype)
    return of_query, of_keys[..., :rank], of_keys[..., rank:], of_sink


def _with_chosen_keys(
    query: Tensor, latents: Tensor, rope: Tensor, sink: Tensor | None, indices: Tensor, mask: Any, scale: float
) -> Iterator[_Part]:
    batch, queries, heads, size = query.shape
    keys, count = latents.shape[1], indices.shape[-1]
    first = torch.arange(batch, device=query.device).view(-1, 1, 1) * keys
    latents, rope = latents.flatten(0, 1), rope.flatten(0, 1)
    row = count * (size * (2 * query.element_size() + 4) + heads * (query.element_size() + 8))
    for begin, end in in_budget(queries, batch * row):
        rows = slice(begin, end)
        chosen = indices[:, rows].long()
        flat = (chosen + first).flatten()
        gathered = torch.cat((latents.index_select(0, flat), rope.index_select(0, flat)), dim=-1)
        gathered = gathered.view(batch * chosen.shape[1], count, gathered.shape[1])
        few = query[:, rows].flatten(0, 1)
        scores = (few.float() @ gathered.float().mT).mul_(scale)  # rounded to 16 bits they are further from float64
        seen = _mask_at(mask_of(mask, begin, end, query), chosen).flatten(0, 1)
        weights = softmax(masked(scores, seen.unsqueeze(1)).unsqueeze(2), sink).squeeze(2)
        yield _Part(rows, flat, gathered, few, weights)


def _by_operator(query: Tensor, latents: Tensor, rope: Tensor, indices: Tensor, mask: Any, scale: float) -> Tensor:
    """Attend by an operator, which takes no mask: keys that a query does not see become absent, behind the others."""
    rank = latents.shape[-1]
    is_causal = isinstance(mask, MaskDescription) and mask.is_causal(query.shape[1], latents.shape[1])
    none = None
    if not is_causal:
        seen = _seen(mask, indices)
        none = ~seen.any(-1)[..., None, None]
        indices = torch.where(seen, indices, ABSENT)
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
    return out if none is None else out.masked_fill(none, 0)


def _seen(mask: MaskDescription | Tensor, indices: Tensor) -> Tensor:
    """Tell which of the chosen keys their queries see."""
    parts = []
    for begin, end in in_budget(indices.shape[1], 4 * len(indices) * indices.shape[-1]):
        chosen = indices[:, begin:end].long()
        parts.append(_mask_at(mask_of(mask, begin, end, chosen), chosen))
    return torch.cat(parts, dim=1)


def _mask_at(rows: Tensor, chosen: Tensor) -> Tensor:
    """Return what rows of a mask, ``[B or 1, T, S_k]``, say of chosen keys, ``[B, T, k]``.

    A bool one is gathered in float16: CANN gathers bool, and much of uint8, on an AI CPU (ops-nn, gather_elements.cpp).
    """
    is_bool = rows.dtype == torch.bool
    found = (rows.half() if is_bool else rows).expand(len(chosen), -1, -1).gather(-1, chosen)
    return found.bool() if is_bool else found


def in_budget(queries: int, row: int) -> Iterator[tuple[int, int]]:
    """Yield where parts of the queries begin and end, of which each takes so many bytes."""
    rows = max(1, BYTES // max(1, row))
    for begin in range(0, queries, rows):
        yield begin, min(begin + rows, queries)


def mask_of(mask: MaskDescription | Tensor, begin: int, end: int, like: Tensor) -> Tensor:
    """Return what a mask says of some queries, ``[B or 1, end - begin, S_k]``, where another tensor is."""
    rows = mask.of_queries(begin, end) if isinstance(mask, MaskDescription) else mask[..., begin:end, :]
    return (rows[:, 0] if rows.dim() == 4 else rows).to(like.device)


def masked(scores: Tensor, rows: Tensor) -> Tensor:
    return scores.masked_fill(~rows, -torch.inf) if rows.dtype == torch.bool else scores + rows
