"""Attention composed of torch's operators: for what no operator of torch_npu computes, and for other devices.

The products are in the dtype of the query, the softmax in float32, as transformers' eager attention has it. A query
that sees no key gives zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention_spec import Band, Options, Sequences


def attend_in_torch(query: Tensor, key: Tensor, value: Tensor, seen: Band | Tensor, options: Options) -> Tensor:
    """Compute attention with all scores in memory.

    Args:
        query: ``[B, N, S_q, D]``.
        key: ``[B, N_k, S_k, D]``, where ``N`` is a multiple of ``N_k``.
        value: ``[B, N_k, S_k, D_v]``.
        seen: a band, or what is left out, ``[B or 1, N or 1, S_q, S_k]``.
        options: how scores become weights.

    Returns:
        ``[B, S_q, N, D_v]``.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:  # torch_npu's repeat_interleave loses tangents
        key, value = (tensor[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for tensor in (key, value))
    scores = (query @ key.mT).mul(options.scale).to(_statistics_dtype(query))
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.slopes is not None:
        slopes = options.slopes.to(scores.dtype)[..., None, None]
        queries, keys = scores.shape[-2:]
        scores = scores - slopes * _distances(queries, keys, keys - queries, scores.device).abs()
    if options.bias is not None:
        scores = scores + options.bias
    left_out = outside(seen, *scores.shape[-2:], scores.device) if isinstance(seen, Band) else seen
    if left_out is not None:
        scores = scores.masked_fill(left_out, -torch.inf)
    weights = softmax(scores, options.sink)
    weights = F.dropout(weights.to(query.dtype), options.dropout)
    return (weights @ value).transpose(1, 2).contiguous()


def attend_packed_in_torch(
    query: Tensor, key: Tensor, value: Tensor, sequences: Sequences, seen: Band | Tensor, options: Options
) -> Tensor:
    """Compute attention within each sequence of a packed batch, one after the other.

    Args:
        query: ``[T, N, D]``.
        key: ``[T_k, N_k, D]``.
        value: ``[T_k, N_k, D_v]``.
        sequences: where they end; at least one.
        seen: which keys of its sequence a query sees, or what is left out in the longest, ``[S_q, S_k]``.
        options: how scores become weights.

    Returns:
        ``[T, N, D_v]``.
    """
    parts, start, key_start = [], 0, 0
    for i, (end, key_end) in enumerate(zip(*sequences)):
        q = query[start:end].transpose(0, 1).unsqueeze(0)
        k, v = (tensor[key_start:key_end].transpose(0, 1).unsqueeze(0) for tensor in (key, value))
        of_sequence = seen if isinstance(seen, Band) else seen[: q.shape[2], : k.shape[2]]
        parts.append(attend_in_torch(q, k, v, of_sequence, _of_sequence(options, i))[0])
        start, key_start = end, key_end
    return torch.cat(parts)


def _of_sequence(options: Options, i: int) -> Options:
    """Return the options of one sequence: slopes can be those of a sequence."""
    if options.slopes is None or options.slopes.dim() == 1:
        return options
    return Options(**{**vars(options), "slopes": options.slopes[i]})


def _statistics_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def softmax(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Compute the softmax of rows in which everything can be left out; the sink is one more score of a row."""
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


def outside(band: Band, queries: int, keys: int, device: torch.device) -> Tensor | None:
    """Mark the keys outside of a band, ``[queries, keys]``; None where there are none."""
    shift, band = band.shift(queries, keys), band.within(queries, keys)
    distances = None if band.left is band.right is None else _distances(queries, keys, shift, device)
    behind = None if band.right is None else distances > band.right
    before = None if band.left is None else distances < -band.left
    return behind if before is None else before if behind is None else before | behind


def _distances(queries: int, keys: int, shift: int, device: torch.device) -> Tensor:
    """Return how far each key is behind that at which a query stands, ``[queries, keys]``; the first one at `shift`."""
    places = torch.arange(keys, device=device)
    return places - (torch.arange(queries, device=device) + shift).unsqueeze(-1)
