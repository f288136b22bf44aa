"""Attention in plain torch: for what no operator of torch_npu computes, and for other devices.

The products are in the dtype of the query, the softmax in float32, as transformers' eager attention has it. A query
that sees no key gives zero.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention_spec import AttentionSpec, Band, SequenceEnds


def reference_attention(
    query: Tensor, key: Tensor, value: Tensor, masking: Band | Tensor, spec: AttentionSpec
) -> Tensor:
    """Compute attention with all scores in memory.

    Args:
        query: ``[B, N, S_q, D]``.
        key: ``[B, N_k, S_k, D]``, where ``N`` is a multiple of ``N_k``.
        value: ``[B, N_k, S_k, D_v]``.
        masking: a band, or bool ``[B or 1, N or 1, S_q, S_k]``, True where a key is masked out.
        spec: how scores become weights.

    Returns:
        ``[B, S_q, N, D_v]``.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # torch_npu's repeat_interleave loses tangents
        key, value = (tensor[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for tensor in (key, value))
    scores = (query @ key.mT).mul(spec.scale).to(torch.promote_types(query.dtype, torch.float32))
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if spec.alibi_slopes is not None:
        alibi_slopes = spec.alibi_slopes.to(scores.dtype)[..., None, None]
        queries, keys = scores.shape[-2:]
        scores = scores - alibi_slopes * _distances(queries, keys, keys - queries, scores.device).abs()
    if spec.bias is not None:
        scores = scores + spec.bias
    if isinstance(masking, Band):
        masking = masked_out_by_band(masking, *scores.shape[-2:], scores.device)
    if masking is not None:
        scores = scores.masked_fill(masking, -torch.inf)
    weights = softmax_with_sink(scores, spec.sink)
    weights = F.dropout(weights.to(query.dtype), spec.dropout)
    return (weights @ value).transpose(1, 2).contiguous()


def reference_varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, sequences: SequenceEnds, masking: Band | Tensor, spec: AttentionSpec
) -> Tensor:
    """Compute attention within each of several packed sequences, one after the other.

    Args:
        query: ``[T, N, D]``.
        key: ``[T_k, N_k, D]``.
        value: ``[T_k, N_k, D_v]``.
        sequences: where they end; at least one.
        masking: a band, or a mask of the longest sequence, bool ``[S_q, S_k]``, True where a key is masked out.
        spec: how scores become weights.

    Returns:
        ``[T, N, D_v]``.
    """
    parts, start, key_start = [], 0, 0
    for i, (end, key_end) in enumerate(zip(*sequences)):
        q = query[start:end].transpose(0, 1).unsqueeze(0)
        k, v = (tensor[key_start:key_end].transpose(0, 1).unsqueeze(0) for tensor in (key, value))
        cropped = masking if isinstance(masking, Band) else masking[: q.shape[2], : k.shape[2]]
        parts.append(reference_attention(q, k, v, cropped, _select_slopes(spec, i))[0])
        start, key_start = end, key_end
    return torch.cat(parts)


def _select_slopes(spec: AttentionSpec, i: int) -> AttentionSpec:
    """Return the specification for sequence ``i``, which may have ALiBi slopes of its own."""
    if spec.alibi_slopes is None or spec.alibi_slopes.dim() == 1:
        return spec
    return replace(spec, alibi_slopes=spec.alibi_slopes[i])


def softmax_with_sink(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Compute the softmax over keys, with a sink as one more key; all zero for a query that sees no key."""
    maximum = scores.detach().amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    if sink is not None:
        sink = sink.to(scores.dtype).view(1, -1, 1, 1)
        maximum = torch.maximum(maximum, sink.detach())
    weights = torch.exp(scores - maximum)
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        return weights / (total + torch.exp(sink - maximum))
    return weights / total.masked_fill(total == 0, 1.0)


def masked_out_by_band(band: Band, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Return which keys are outside of a band, bool ``[queries, keys]``; None where all are inside."""
    shift, band = band.shift(queries, keys), band.within(queries, keys)
    distances = None if band.left is band.right is None else _distances(queries, keys, shift, device)
    behind = None if band.right is None else distances > band.right
    before = None if band.left is None else distances < -band.left
    return behind if before is None else before if behind is None else before | behind


def _distances(queries: int, keys: int, shift: int, device: torch.device) -> Tensor:
    """Return the distance from each query to each key, ``[queries, keys]``, negative for earlier keys.

    The first query is aligned with key ``shift``.
    """
    return torch.arange(keys, device=device) - (torch.arange(queries, device=device) + shift).unsqueeze(-1)
