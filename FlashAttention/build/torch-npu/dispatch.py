"""Attention of tensors as they lie: on the NPU in one launch where an operator computes it, otherwise in torch."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .attention_spec import Band, Options, Sequences
from .ops.decoding import decode, is_decoding
from .ops.fusion_attention import refuses_sinks, sparsity_of
from .ops.fusion_attention_autograd import launch_differentiable
from .ops.limits import LONGEST, MOST_SEQUENCES, fits_packed_gradient, is_fused, is_fused_packed, padded
from .ops.reference import attend_in_torch, attend_packed_in_torch


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Band | Tensor, options: Options) -> Tensor:
    """Compute attention of a batch of sequences of one length.

    Args:
        query: ``[B, N, S_q, D]``, a view of memory that lies as ``[B, S_q, N, D]`` or as its shape says, as all of the
            three: what lies otherwise is copied.
        key: ``[B, N_k, S_k, D]``.
        value: ``[B, N_k, S_k, D_v]``.
        seen: a band, or what is left out, bool ``[B or 1, N or 1, S_q, S_k]``.
        options: how scores become weights.

    Returns:
        ``[B, S_q, N, D_v]``, contiguous, in the dtype of the query. A query that sees no key gives zero.
    """
    if isinstance(seen, Band):
        key, value = _reachable(query, key, value, seen)
    if not is_fused(query, key, value, options) or max(query.shape[2], key.shape[2]) > LONGEST:
        return attend_in_torch(query, key, value, seen, options)
    if is_decoding(query, key, value, seen, options):
        return decode(query, key, value, options)
    size = value.shape[3]
    filled = padded(query, key, value)
    layout = _nearest_layout(*filled)
    arguments = filled if layout == "BNSD" else tuple(tensor.transpose(1, 2) for tensor in filled)
    if isinstance(seen, Tensor):
        seen = _whole(seen, query, key)
    sparsity = sparsity_of(seen, query.shape[2], key.shape[2], query)
    try:
        result = launch_differentiable(*arguments, layout, sparsity, options)
    except RuntimeError as error:
        if options.sink is None or not refuses_sinks(error):
            raise
        return attend_in_torch(query, key, value, seen, options)
    if result.shape[-1] > size:
        result = result[..., :size]
    return (result.transpose(1, 2) if layout == "BNSD" else result).contiguous()


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sequences: Sequences,
    band: Band,
    options: Options,
    left_out: Tensor | None = None,
) -> Tensor:
    """Compute attention within each sequence of a packed batch.

    Args:
        query: ``[T, N, D]``, the sequences one behind the other.
        key: ``[T_k, N_k, D]``.
        value: ``[T_k, N_k, D_v]``.
        sequences: where they end. What lies behind the last one gives zero.
        band: which keys of its sequence a query sees.
        options: how scores become weights.
        left_out: the same for the longest queries and keys, ``[S_q, S_k]``, for a band that no operator is told of.

    Returns:
        ``[T, N, D_v]``, in the dtype of the query.
    """
    total = query.shape[0]
    if not sequences.ends:  # as one without tokens, which keeps the graph of autograd
        sequences, options = Sequences((0,), (0,)), replace(options, slopes=None)
    used, key_used = (ends[-1] for ends in sequences)
    query, key, value = _part(query, 0, used), _part(key, 0, key_used), _part(value, 0, key_used)
    if (
        is_fused(query, key, value, options)
        and is_fused_packed(sequences, band)
        and fits_packed_gradient(query, key, value, band if left_out is None else None)
    ):
        try:
            result = _launch_packed(query, key, value, sequences, band if left_out is None else left_out, options)
        except RuntimeError as error:
            if options.sink is None or not refuses_sinks(error):
                raise
            result = attend_packed_in_torch(query, key, value, sequences, band, options)
    else:
        result = attend_packed_in_torch(query, key, value, sequences, band, options)
    return result if used == total else F.pad(result, (0, 0, 0, 0, 0, total - used))


def _launch_packed(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, seen: Band | Tensor, options: Options
) -> Tensor:
    """Launch once for as many sequences as the operator takes."""
    size, sequences = value.shape[2], sequences.without_empty()
    query, key, value = padded(query, key, value)
    parts, start, key_start = [], 0, 0
    for first in range(0, len(sequences.ends), MOST_SEQUENCES):
        ends, key_ends = (ends[first : first + MOST_SEQUENCES] for ends in sequences)
        end, key_end = ends[-1], key_ends[-1]
        if end > start:
            some = _part(query, start, end), *(_part(tensor, key_start, key_end) for tensor in (key, value))
            shifted = Sequences(tuple(e - start for e in ends), tuple(e - key_start for e in key_ends))
            longest, key_longest = (max(lengths) for lengths in zip(*shifted.lengths()))
            of_these = seen[:longest, :key_longest] if isinstance(seen, Tensor) else seen
            sparsity = sparsity_of(of_these, longest, key_longest, query)
            parts.append(launch_differentiable(*some, "TND", sparsity, options, *shifted))
        start, key_start = end, key_end
    result = parts[0] if len(parts) == 1 else torch.cat(parts)
    return result[..., :size].contiguous() if result.shape[-1] > size else result


def _part(tensor: Tensor, start: int, end: int) -> Tensor:
    """Return rows of a tensor. All of them are itself: the gradient of a slice is a copy."""
    return tensor if (start, end) == (0, len(tensor)) else tensor[start:end]


def _reachable(query: Tensor, key: Tensor, value: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """Leave out the keys before all that a query sees: of a long cache a window sees its end."""
    if band.left is None:
        return key, value
    reachable = query.shape[2] + band.left
    if reachable >= key.shape[2]:
        return key, value
    return key[:, :, -reachable:], value[:, :, -reachable:]


def _nearest_layout(query: Tensor, key: Tensor, value: Tensor) -> str:
    """Choose the layout in which less has to be copied: projections leave BSND, caches hold BNSD.

    The result is wanted as BSND, and copied where it is not.
    """
    as_bnsd = _copied(query) + _copied(key) + _copied(value) + (query.numel() if query.shape[2] > 1 else 0)
    as_bsnd = sum(_copied(tensor.transpose(1, 2)) for tensor in (query, key, value))
    return "BNSD" if as_bnsd < as_bsnd else "BSND"


def _copied(tensor: Tensor) -> int:
    return 0 if tensor.is_contiguous() else tensor.numel()


def _whole(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Give a mask one of the shapes that the operators take: BNSS, B1SS or 11SS."""
    batch, heads = query.shape[:2]
    rows, columns = mask.shape[:2]
    shape = (1, 1) if rows == columns == 1 else (batch, heads if columns > 1 else 1)
    return mask.expand(*shape, query.shape[2], key.shape[2]).contiguous()
