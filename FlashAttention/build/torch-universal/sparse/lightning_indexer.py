"""Indexers of sparse attention: which keys a query attends to, of DeepSeek-V3.2 and others.

The scores of all heads are not made: what is made for some queries at a time takes no more than `BYTES` of
`chosen_keys`, however many there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.autocast import without_autocast
from .._common.captures import capturing
from ..attention_spec import CAUSAL
from ..masks.mask_description import MaskDescription
from ..ops.limits import MOST_ROWS_COPIED, is_fused_choice, of_one_dtype
from ..varlen.varlen_batch import Packing
from .sparse_attention import ABSENT, in_budget, mask_of, masked

_ALL_KEYS, _UP_TO_ITS_OWN = 0, 3  # sparse modes: the last query stands at the last key
_FROM_START = CAUSAL._replace(from_start=True)


def top_k_keys(
    query: Tensor, key: Tensor, weights: Tensor, mask: MaskDescription | Tensor, count: int, scale: float = 1.0
) -> Tensor:
    """Choose for each query the keys with the highest ``sum_h weights_h · relu(scale · q_h · k)``.

    Scores are in float32. Of equal ones torch.topk chooses, or npu_lightning_indexer where that computes them. Where
    there are no more keys than are to be chosen, they are all returned in their order; a query that sees fewer gets
    others with them, which the mask leaves out. Of a prompt the host reads once which tokens are padding, for all
    layers, unless a graph is captured.

    Args:
        query: ``[B, S_q, H, D]``.
        key: ``[B, S_k, D]``.
        weights: ``[B, S_q, H]``.
        mask: what ``attention_mask`` returned; or bool, True where a query sees a key, or floating and added to the
            scores, ``[B or 1, S_q, S_k]`` or with heads before ``S_q``, of which the first one counts.
        count: how many keys are chosen.
        scale: a factor above 0 of the products.

    Returns:
        int32 ``[B, S_q, count]``, or as many as there are keys, with the highest scores first.

    Raises:
        ValueError: shapes do not fit.
        TypeError: query, key or weights are not floating point.
    """
    _check(query, key, weights)
    keys = key.shape[1]
    if count >= keys:
        return torch.arange(keys, dtype=torch.int32, device=key.device).expand(*query.shape[:2], -1)
    query, key = of_one_dtype(query, key)
    with without_autocast(query):
        if is_fused_choice(query, key, count):
            found = _by_operator(query.contiguous(), key.contiguous(), weights.float().contiguous(), mask, count)
            if found is not None:
                return found
        return _of_scores(query, key, weights.float(), mask, count, scale)


def _check(query: Tensor, key: Tensor, weights: Tensor) -> None:
    """Raise what :func:`top_k_keys` says of tensors that do not fit."""
    for name, tensor in (("query", query), ("key", key), ("weights", weights)):
        if not tensor.is_floating_point():
            raise TypeError(f"top_k_keys: {name} must be floating point, got {tensor.dtype}")
    fits = query.dim() == 4 and key.dim() == 3 and weights.shape == query.shape[:3]
    if not fits or (key.shape[0], key.shape[2]) != (query.shape[0], query.shape[3]):
        shapes = [list(tensor.shape) for tensor in (query, key, weights)]
        raise ValueError(
            "top_k_keys: query [B, S_q, H, D], key [B, S_k, D] and weights [B, S_q, H] have to fit, "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )


def _by_operator(
    query: Tensor, key: Tensor, weights: Tensor, mask: MaskDescription | Tensor, count: int
) -> Tensor | None:
    """Choose by ``npu_lightning_indexer``, which is told lengths and no mask; None where lengths are not enough."""
    batch, queries, keys = *query.shape[:2], key.shape[1]
    is_described = isinstance(mask, MaskDescription)
    if is_described and mask.is_causal(queries, keys):
        found = _operator(query, key, weights, count)
        return torch.where(found == ABSENT, keys - 1, found)  # of rows that do not see the last key
    if queries == 1:
        places = _places_of_one_query(query, mask, batch, keys)
        return None if places is None else _of_one_query(query, key, weights, places, count)
    if is_described and (queries, keys) == (mask.queries, mask.keys) and not capturing():
        packing = mask.plain(batch)
        if isinstance(packing, Packing) and packing.band == CAUSAL and packing.is_of_itself():
            return _of_sequences(query, key, weights, packing, count)
        if isinstance(packing, Packing) and packing.band == _FROM_START:
            lengths = packing.sequences.lengths()
            if all(length == queries for length, _ in lengths):
                return _before_padding(query, key, weights, mask, count, min(kept for _, kept in lengths))
    return None


def _places_of_one_query(query: Tensor, mask: MaskDescription | Tensor, batch: int, keys: int) -> _Places | None:
    """Return where the keys are that one query a row sees, for all layers; None of a mask that is added."""
    if (isinstance(mask, Tensor) and mask.dtype != torch.bool) or batch > MOST_ROWS_COPIED:
        return None
    make = lambda: _places(mask_of(mask, 0, 1, query)[..., :keys].expand(batch, 1, -1).squeeze(1))  # noqa: E731
    return mask.made((batch, keys, query.device), make) if isinstance(mask, MaskDescription) else make()


def _of_one_query(query: Tensor, key: Tensor, weights: Tensor, places: _Places, count: int) -> Tensor:
    """Choose among the keys that one query a row sees, in place where they lie one behind the other.

    Elsewhere ``npu_moe_init_routing_v2`` copies them, and them alone, to lie so: which it is the device decides.
    """
    batch, keys, _ = key.shape
    query, key, weights = query.flatten(0, 1), key.flatten(0, 1), weights.flatten(0, 1)
    in_place = _operator(query, key, weights, count, "TND", places.query_ends, places.key_ends)
    copies, _, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        key,
        places.copied,
        expert_num=batch + 1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, batch],
        row_idx_type=1,
    )
    copied_ends = counts.cumsum(0, dtype=torch.int32)  # CANN sums int64 on an AI CPU
    among_copies = _operator(query, copies, weights, count, "TND", places.rows + 1, copied_ends)
    found = torch.where(places.are_together, in_place, among_copies)
    found = torch.where(found == ABSENT, keys - 1, found)
    return _of_rows(places.order, found).int().unsqueeze(1)


class _Places(NamedTuple):
    """Says, on the device, where the keys are that one query a row sees."""

    order: Tensor  # int64 [B, S_k]: those that it sees before all others
    are_together: Tensor  # bool [B, 1]: whether they lie one behind the other
    rows: Tensor  # int32 [B]: 0, 1, 2 ...
    query_ends: Tensor  # int32 [3B], of sequences: the keys before, which have no query; those that it sees; others
    key_ends: Tensor  # int32 [3B]
    copied: Tensor  # int32 [B · S_k, 1]: the row of a key that is copied, B of others


def _places(seen: Tensor) -> _Places:
    """Return where the keys are that are seen, ``[B, S_k]``.

    Each row has one at least in each launch, even where that is not seen or not needed: for sequences without any the
    operator writes nothing (CANN's ops-transformer, lightning_indexer_kernel, ``ProcessInvalid``, in TND).
    """
    batch, keys = seen.shape
    rows = torch.arange(batch, dtype=torch.int32, device=seen.device)
    row, number = rows.unsqueeze(-1), seen.sum(-1, keepdim=True, dtype=torch.int32)
    order = seen.half().sort(dim=-1, descending=True, stable=True).indices
    first, last = (each.int() for each in (order[:, :1], _of_rows(order, (number - 1).clamp(min=0))))
    are_together = last - first < number
    behind = torch.where(are_together, last, first) + 1
    ends = torch.cat((first, behind, torch.full_like(first, keys)), dim=-1) + row * keys
    copied = torch.where(seen & ~are_together, row, batch).scatter_(-1, first.long(), row)
    query_ends = torch.cat((row, row + 1, row + 1), dim=-1)
    return _Places(order, are_together, rows, query_ends.flatten(), ends.flatten(), copied.view(-1, 1))


def _of_rows(numbers: Tensor, places: Tensor) -> Tensor:
    """Return what stands at places of their row, ``[B, k]`` of ``[B, S]``: many int64 are gathered on an AI CPU."""
    batch, size = numbers.shape
    starts = torch.arange(0, batch * size, size, dtype=places.dtype, device=places.device).unsqueeze(-1)
    return numbers.flatten().index_select(0, (places + starts).flatten()).view_as(places)


def _of_sequences(query: Tensor, key: Tensor, weights: Tensor, packing: Packing, count: int) -> Tensor:
    """Choose among the keys of a query's own sequence, and up to its own."""
    batch, keys, _ = key.shape
    query, key, weights = query.flatten(0, 1), key.flatten(0, 1), weights.flatten(0, 1)
    places, ends, first = packing.tokens(query.device)
    if len(places) < batch * keys:
        query, key, weights = (tensor.index_select(0, places) for tensor in (query, key, weights))
    found = _operator(query, key, weights, count, "TND", ends, ends)
    own, first = (places % keys).unsqueeze(-1), (first % keys).unsqueeze(-1)
    unseen = torch.where(own < keys - 1, keys - 1, first - 1).clamp_(min=0)
    found = torch.where(found == ABSENT, unseen, found + first).int()
    if len(places) < batch * keys:
        found = found.new_zeros(batch * keys, count).index_copy_(0, places, found)
    return found.unflatten(0, (batch, keys))


def _before_padding(
    query: Tensor, key: Tensor, weights: Tensor, mask: MaskDescription, count: int, first: int
) -> Tensor:
    """Choose where padding stands behind tokens, from the place ``first`` on: only padding itself would see it."""
    keys = key.shape[1]
    found = _operator(query, key, weights, count)
    lengths = mask_of(mask, keys - 1, keys, query).squeeze(1).sum(-1, dtype=torch.int32)
    few = query[:, first:].contiguous(), key, weights[:, first:].contiguous()
    of_padding = _operator(*few, count, key_lengths=lengths, mode=_ALL_KEYS)
    is_padding = torch.arange(first, keys, device=query.device) >= lengths.unsqueeze(-1)
    found = torch.cat((found[:, :first], torch.where(is_padding.unsqueeze(-1), of_padding, found[:, first:])), dim=1)
    return torch.where(found == ABSENT, keys - 1, found)


def _operator(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    count: int,
    layout: str = "BSND",
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    mode: int = _UP_TO_ITS_OWN,
) -> Tensor:
    """Return int32 ``[..., count]``, with `ABSENT` behind the keys that a query sees."""
    found, _ = torch.ops.npu.npu_lightning_indexer(
        query,
        key.unsqueeze(-2),
        weights,
        actual_seq_lengths_query=lengths,
        actual_seq_lengths_key=key_lengths,
        layout_query=layout,
        layout_key=layout,
        sparse_count=count,
        sparse_mode=mode,
    )
    return found.squeeze(-2)


def _of_scores(
    query: Tensor, key: Tensor, weights: Tensor, mask: MaskDescription | Tensor, count: int, scale: float
) -> Tensor:
    batch, queries, heads, _ = query.shape
    keys, turned = key.shape[1], key.float().mT
    result = torch.empty(batch, queries, count, dtype=torch.int32, device=query.device)
    for begin, end in in_budget(queries, 4 * batch * heads * keys):
        seen = mask.reach(end, keys) if isinstance(mask, MaskDescription) else keys
        scores = query[:, begin:end].flatten(1, 2).float() @ turned[..., :seen]
        if scale != 1:
            scores = scores.mul_(scale)
        scores = weights[:, begin:end].unsqueeze(-2) @ scores.relu_().unflatten(1, (-1, heads))
        scores = F.pad(scores.squeeze(-2), (0, keys - seen), value=-torch.inf)
        result[:, begin:end] = masked(scores, mask_of(mask, begin, end, query)[..., :keys]).topk(count).indices
    return result
