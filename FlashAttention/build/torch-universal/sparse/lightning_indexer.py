"""The lightning indexer of DeepSeek sparse attention: choose the keys that a query attends to.

The scores of all queries are never in memory at once: a block of them takes no more than ``BLOCK_BYTES`` of
sparse_attention.py.
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
from ..ops.limits import MOST_COPIED_BATCHES, in_autocast_dtype, is_fused_indexer
from ..varlen.varlen_batch import VarlenBatch
from .sparse_attention import ABSENT, blocks_in_budget, mask_scores, mask_slice

_NO_CAUSAL_MASK, _CAUSAL_LOWER_RIGHT = 0, 3  # values of sparse_mode
_CAUSAL_UPPER_LEFT = CAUSAL._replace(upper_left=True)


def top_k_keys(
    query: Tensor, key: Tensor, weights: Tensor, mask: MaskDescription | Tensor, count: int, scale: float = 1.0
) -> Tensor:
    """Choose for each query the keys with the highest ``sum_h weights_h · relu(scale · q_h · k)``.

    Scores are in float32. Ties are resolved as torch.topk does, or npu_lightning_indexer where that computes them.
    If there are at most ``count`` keys, all are returned in their order. A query that sees fewer than ``count`` keys
    also gets some that the mask excludes. Of a prompt with padding the host reads the mask once for all layers, unless
    a graph is captured.

    Args:
        query: ``[B, S_q, H, D]``.
        key: ``[B, S_k, D]``.
        weights: ``[B, S_q, H]``.
        mask: what ``attention_mask`` returned; or bool, True where a query sees a key, or floating and added to the
            scores, ``[B or 1, S_q, S_k]`` or with heads before ``S_q``, of which the first one counts.
        count: how many keys are chosen.
        scale: a positive factor of the products.

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
    query, key = in_autocast_dtype(query, key)
    with without_autocast(query):
        if is_fused_indexer(query, key, count):
            found = _fused_top_k(query.contiguous(), key.contiguous(), weights.float().contiguous(), mask, count)
            if found is not None:
                return found
        return _reference_top_k(query, key, weights.float(), mask, count, scale)


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


def _fused_top_k(
    query: Tensor, key: Tensor, weights: Tensor, mask: MaskDescription | Tensor, count: int
) -> Tensor | None:
    """Choose by ``npu_lightning_indexer``, which takes lengths but no mask; None if lengths cannot express the mask."""
    batch, queries, keys = *query.shape[:2], key.shape[1]
    is_described = isinstance(mask, MaskDescription)
    if is_described and mask.is_causal(queries, keys):
        found = _lightning_indexer(query, key, weights, count)
        return torch.where(found == ABSENT, keys - 1, found)  # only of queries that do not see the last key
    if queries == 1:
        visible = _single_query_keys(query, mask, batch, keys)
        return None if visible is None else _top_k_single_query(query, key, weights, visible, count)
    if is_described and (queries, keys) == (mask.queries, mask.keys) and not capturing():
        varlen = mask.band_or_varlen(batch)
        if isinstance(varlen, VarlenBatch) and varlen.band == CAUSAL and varlen.is_self_attention():
            return _top_k_within_sequences(query, key, weights, varlen, count)
        if isinstance(varlen, VarlenBatch) and varlen.band == _CAUSAL_UPPER_LEFT:
            lengths = varlen.sequences.lengths()
            if all(length == queries for length, _ in lengths):
                return _top_k_right_padded(query, key, weights, mask, count, min(kept for _, kept in lengths))
    return None


def _single_query_keys(query: Tensor, mask: MaskDescription | Tensor, batch: int, keys: int) -> _VisibleKeys | None:
    """Return the keys that the one query of each sequence sees, found once for all layers; None for an added mask."""
    if (isinstance(mask, Tensor) and mask.dtype != torch.bool) or batch > MOST_COPIED_BATCHES:
        return None

    def find() -> _VisibleKeys:
        return _find_visible_keys(mask_slice(mask, 0, 1, query)[..., :keys].expand(batch, 1, -1).squeeze(1))

    return mask.cached((batch, keys, query.device), find) if isinstance(mask, MaskDescription) else find()


def _top_k_single_query(query: Tensor, key: Tensor, weights: Tensor, visible: _VisibleKeys, count: int) -> Tensor:
    """Choose among the keys that the one query of each sequence sees.

    The operator takes contiguous keys. Where the visible ones of a sequence are contiguous in the cache they are read
    in place; otherwise ``npu_moe_init_routing_v2`` gathers them. Both are launched, and the device takes the result of
    the one or the other for each sequence, so that the host need not wait for the mask.
    """
    batch, keys, _ = key.shape
    query, key, weights = query.flatten(0, 1), key.flatten(0, 1), weights.flatten(0, 1)
    in_place = _lightning_indexer(query, key, weights, count, "TND", visible.query_ends, visible.key_ends)
    copies, _, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
        key,
        visible.copied,
        expert_num=batch + 1,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        quant_mode=-1,
        active_expert_range=[0, batch],
        row_idx_type=1,
    )
    copied_ends = counts.cumsum(0, dtype=torch.int32)  # CANN sums int64 on an AI CPU
    among_copies = _lightning_indexer(query, copies, weights, count, "TND", visible.batch_indices + 1, copied_ends)
    found = torch.where(visible.are_contiguous, in_place, among_copies)
    found = torch.where(found == ABSENT, keys - 1, found)
    return _gather_last_dim(visible.order, found).int().unsqueeze(1)


class _VisibleKeys(NamedTuple):
    """Holds, on the device, which keys the one query of each sequence sees.

    In place the keys of a sequence are three packed ones: those before the visible keys, these, and those behind them.
    Only the second has a query.
    """

    order: Tensor  # int64 [B, S_k]: indices of keys, the visible ones first
    are_contiguous: Tensor  # bool [B, 1]: whether the visible ones are
    batch_indices: Tensor  # int32 [B]: 0, 1, 2 ...
    query_ends: Tensor  # int32 [3B]: where the three of each sequence end among the queries
    key_ends: Tensor  # int32 [3B]: and among the keys
    copied: Tensor  # int32 [B · S_k, 1]: the batch index of a key that is gathered, B for others


def _find_visible_keys(is_visible: Tensor) -> _VisibleKeys:
    """Find the visible keys of a mask, bool ``[B, S_k]``.

    Each sequence gets at least one key in each launch, even if it sees none or does not need this launch: the operator
    writes nothing for sequences without keys (CANN's ops-transformer, lightning_indexer_kernel, ``ProcessInvalid``, in
    TND).
    """
    batch, keys = is_visible.shape
    batch_indices = torch.arange(batch, dtype=torch.int32, device=is_visible.device)
    batch_index, number = batch_indices.unsqueeze(-1), is_visible.sum(-1, keepdim=True, dtype=torch.int32)
    order = is_visible.half().sort(dim=-1, descending=True, stable=True).indices
    first, last = (each.int() for each in (order[:, :1], _gather_last_dim(order, (number - 1).clamp(min=0))))
    are_contiguous = last - first < number
    behind = torch.where(are_contiguous, last, first) + 1
    ends = torch.cat((first, behind, torch.full_like(first, keys)), dim=-1) + batch_index * keys
    copied = torch.where(is_visible & ~are_contiguous, batch_index, batch).scatter_(-1, first.long(), batch_index)
    query_ends = torch.cat((batch_index, batch_index + 1, batch_index + 1), dim=-1)
    return _VisibleKeys(order, are_contiguous, batch_indices, query_ends.flatten(), ends.flatten(), copied.view(-1, 1))


def _gather_last_dim(numbers: Tensor, indices: Tensor) -> Tensor:
    """Gather ``[B, S]`` at indices ``[B, k]``. It is not torch.gather, which CANN computes of int64 on an AI CPU."""
    batch, size = numbers.shape
    starts = torch.arange(0, batch * size, size, dtype=indices.dtype, device=indices.device).unsqueeze(-1)
    return numbers.flatten().index_select(0, (indices + starts).flatten()).view_as(indices)


def _top_k_within_sequences(query: Tensor, key: Tensor, weights: Tensor, varlen: VarlenBatch, count: int) -> Tensor:
    """Choose by causal attention within packed sequences."""
    batch, keys, _ = key.shape
    query, key, weights = query.flatten(0, 1), key.flatten(0, 1), weights.flatten(0, 1)
    indices, ends, first = varlen.token_layout(query.device)
    if len(indices) < batch * keys:
        query, key, weights = (tensor.index_select(0, indices) for tensor in (query, key, weights))
    found = _lightning_indexer(query, key, weights, count, "TND", ends, ends)
    own, first = (indices % keys).unsqueeze(-1), (first % keys).unsqueeze(-1)
    masked_out_key = torch.where(own < keys - 1, keys - 1, first - 1).clamp_(min=0)
    found = torch.where(found == ABSENT, masked_out_key, found + first).int()
    if len(indices) < batch * keys:
        found = found.new_zeros(batch * keys, count).index_copy_(0, indices, found)
    return found.unflatten(0, (batch, keys))


def _top_k_right_padded(
    query: Tensor, key: Tensor, weights: Tensor, mask: MaskDescription, count: int, first: int
) -> Tensor:
    """Choose by causal attention with padding behind tokens, the earliest of it at key ``first``.

    Tokens do not see padding anyway. Queries of padding see the tokens alone, which a second launch chooses from.
    """
    keys = key.shape[1]
    found = _lightning_indexer(query, key, weights, count)
    lengths = mask_slice(mask, keys - 1, keys, query).squeeze(1).sum(-1, dtype=torch.int32)
    few = query[:, first:].contiguous(), key, weights[:, first:].contiguous()
    padding_choice = _lightning_indexer(*few, count, key_lengths=lengths, mode=_NO_CAUSAL_MASK)
    is_padding = torch.arange(first, keys, device=query.device) >= lengths.unsqueeze(-1)
    found = torch.cat(
        (found[:, :first], torch.where(is_padding.unsqueeze(-1), padding_choice, found[:, first:])), dim=1
    )
    return torch.where(found == ABSENT, keys - 1, found)


def _lightning_indexer(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    count: int,
    layout: str = "BSND",
    lengths: Tensor | None = None,
    key_lengths: Tensor | None = None,
    mode: int = _CAUSAL_LOWER_RIGHT,
) -> Tensor:
    """Launch the operator: int32 ``[..., count]``, with ``ABSENT`` behind the keys if a query sees fewer."""
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


def _reference_top_k(
    query: Tensor, key: Tensor, weights: Tensor, mask: MaskDescription | Tensor, count: int, scale: float
) -> Tensor:
    """Choose from scores that are computed in torch, a block of queries at a time."""
    batch, queries, heads, _ = query.shape
    keys, transposed_key = key.shape[1], key.float().mT
    result = torch.empty(batch, queries, count, dtype=torch.int32, device=query.device)
    for begin, end in blocks_in_budget(queries, 4 * batch * heads * keys):
        reach = mask.visible_keys(end, keys) if isinstance(mask, MaskDescription) else keys
        scores = query[:, begin:end].flatten(1, 2).float() @ transposed_key[..., :reach]
        if scale != 1:
            scores = scores.mul_(scale)
        scores = weights[:, begin:end].unsqueeze(-2) @ scores.relu_().unflatten(1, (-1, heads))
        scores = F.pad(scores.squeeze(-2), (0, keys - reach), value=-torch.inf)
        result[:, begin:end] = mask_scores(scores, mask_slice(mask, begin, end, query)[..., :keys]).topk(count).indices
    return result
