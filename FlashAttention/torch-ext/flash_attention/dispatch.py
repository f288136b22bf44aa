"""Choose what computes an attention: an operator of torch_npu within its limits, and torch beyond them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_spec import AttentionSpec, Band, SequenceEnds
from .ops.decoding import decode, is_decoding
from .ops.fusion_attention import refuses_sinks, to_operator_mask
from .ops.fusion_attention_autograd import launch_differentiable
from .ops.limits import MOST_SEQUENCES, MOST_TOKENS, fits_varlen_gradient, is_fused, is_fused_varlen, pad_heads
from .ops.reference import reference_attention, reference_varlen_attention


def attend(query: Tensor, key: Tensor, value: Tensor, masking: Band | Tensor, spec: AttentionSpec) -> Tensor:
    """Compute attention of a batch of sequences of one length.

    Args:
        query: ``[B, N, S_q, D]``. Like key and value it is best contiguous in this order, or a transposed view of
            contiguous ``[B, S_q, N, D]``: other strides are copied.
        key: ``[B, N_k, S_k, D]``.
        value: ``[B, N_k, S_k, D_v]``.
        masking: a band, or bool ``[B or 1, N or 1, S_q, S_k]``, True where a key is masked out.
        spec: how scores become weights.

    Returns:
        ``[B, S_q, N, D_v]``, contiguous, in the dtype of the query. A query that sees no key gives zero.
    """
    if isinstance(masking, Band):
        key, value = _within_window(query, key, value, masking)
    if not is_fused(query, key, value, spec) or max(query.shape[2], key.shape[2]) > MOST_TOKENS:
        return reference_attention(query, key, value, masking, spec)
    if is_decoding(query, key, value, masking, spec):
        return decode(query, key, value, spec)
    size = value.shape[3]
    padded = pad_heads(query, key, value)
    layout = _cheapest_layout(*padded)
    arguments = padded if layout == "BNSD" else tuple(tensor.transpose(1, 2) for tensor in padded)
    if isinstance(masking, Tensor):
        masking = _expand_mask(masking, query, key)
    operator_mask = to_operator_mask(masking, query.shape[2], key.shape[2], query)
    try:
        result = launch_differentiable(*arguments, layout, operator_mask, spec)
    except RuntimeError as error:
        if spec.sink is None or not refuses_sinks(error):
            raise
        return reference_attention(query, key, value, masking, spec)
    if result.shape[-1] > size:
        result = result[..., :size]
    return (result.transpose(1, 2) if layout == "BNSD" else result).contiguous()


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: SequenceEnds,
    band: Band,
    spec: AttentionSpec,
    masked_out: Tensor | None = None,
) -> Tensor:
    """Compute attention within each of several packed sequences.

    Args:
        query: ``[T, N, D]``, the sequences one behind the other.
        key: ``[T_k, N_k, D]``.
        value: ``[T_k, N_k, D_v]``.
        sequences: where they end. Tokens behind the last one give zero.
        band: which keys of its sequence a query sees.
        spec: how scores become weights.
        masked_out: the band as a mask, ``[S_q, S_k]`` for the longest sequence, where operators have no mode for it.

    Returns:
        ``[T, N, D_v]``, in the dtype of the query.
    """
    total = query.shape[0]
    if not sequences.ends:  # one sequence without tokens stands for none, and keeps the graph of autograd
        sequences, spec = SequenceEnds((0,), (0,)), replace(spec, alibi_slopes=None)
    used, key_used = (ends[-1] for ends in sequences)
    query = _slice(query, slice(0, used))
    key, value = (_slice(tensor, slice(0, key_used)) for tensor in (key, value))
    if (
        is_fused(query, key, value, spec)
        and is_fused_varlen(sequences, band)
        and fits_varlen_gradient(query, key, value, band if masked_out is None else None)
    ):
        try:
            result = _launch_varlen(query, key, value, sequences, band if masked_out is None else masked_out, spec)
        except RuntimeError as error:
            if spec.sink is None or not refuses_sinks(error):
                raise
            result = reference_varlen_attention(query, key, value, sequences, band, spec)
    else:
        result = reference_varlen_attention(query, key, value, sequences, band, spec)
    return result if used == total else F.pad(result, (0, 0, 0, 0, 0, total - used))


def _launch_varlen(
    query: Tensor, key: Tensor, value: Tensor, sequences: SequenceEnds, masking: Band | Tensor, spec: AttentionSpec
) -> Tensor:
    """Launch the operator once for each ``MOST_SEQUENCES`` sequences, as many as it takes."""
    size, sequences = value.shape[2], sequences.without_empty()
    query, key, value = pad_heads(query, key, value)
    parts = []
    for queries, keys, part in sequences.split(MOST_SEQUENCES):
        if queries.stop > queries.start:
            tensors = _slice(query, queries), _slice(key, keys), _slice(value, keys)
            longest, key_longest = part.longest()
            cropped = masking[:longest, :key_longest] if isinstance(masking, Tensor) else masking
            operator_mask = to_operator_mask(cropped, longest, key_longest, query)
            parts.append(launch_differentiable(*tensors, "TND", operator_mask, spec, *part))
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result[..., :size].contiguous() if result.shape[-1] > size else result


def _slice(tensor: Tensor, tokens: slice) -> Tensor:
    """Return some tokens of a tensor, and the tensor itself for all of them: the gradient of a slice is a copy."""
    return tensor if (tokens.start, tokens.stop) == (0, len(tensor)) else tensor[tokens]


def _within_window(query: Tensor, key: Tensor, value: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """Return the keys and values from the first that a query sees: a sliding window sees the end of a long cache."""
    if band.left is None:
        return key, value
    reachable = query.shape[2] + band.left
    if reachable >= key.shape[2]:
        return key, value
    return key[:, :, -reachable:], value[:, :, -reachable:]


def _cheapest_layout(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Choose the layout in which less has to be copied: projections return BSND, caches hold BNSD.

    The result has to be BSND, and is copied where it is not.
    """
    as_bnsd = _copied_numbers(query) + _copied_numbers(key) + _copied_numbers(value)
    as_bnsd += query.numel() if query.shape[2] > 1 else 0
    as_bsnd = sum(_copied_numbers(tensor.transpose(1, 2)) for tensor in (query, key, value))
    return "BNSD" if as_bnsd < as_bsnd else "BSND"


def _copied_numbers(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.numel()


def _expand_mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Expand a mask to one of the shapes that the operators take: BNSS, B1SS or 11SS."""
    batch, heads = query.shape[:2]
    mask_batch, mask_heads = mask.shape[:2]
    shape = (1, 1) if mask_batch == mask_heads == 1 else (batch, heads if mask_heads > 1 else 1)
    return mask.expand(*shape, query.shape[2], key.shape[2]).contiguous()
