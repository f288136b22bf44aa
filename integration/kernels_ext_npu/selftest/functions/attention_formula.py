"""Attention in float64, written down row by row from flash-attn's description of its parameters."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute ``[B, S_q, N, D_v]`` of ``[B, S, N, D]`` in float64, one score matrix a sequence and head."""
    group = q.shape[2] // k.shape[2]
    rows = []
    for b in range(q.shape[0]):
        heads = []
        for n in range(q.shape[2]):
            slope = None if slopes is None else slopes.expand(q.shape[0], -1)[b, n].double()
            sink = None if sinks is None else sinks[n]
            scores = q[b, :, n] @ k[b, :, n // group].T * scale
            heads.append(_head(scores, v[b, :, n // group], causal, window, softcap, slope, sink))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows)


def packed(
    q: Tensor, k: Tensor, v: Tensor, lengths: list[int], key_lengths: list[int], scale: float, **options: Any
) -> Tensor:
    """Compute ``[T, N, D_v]`` of sequences that lie one behind the other."""
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths))
    slopes = options.pop("slopes", None)
    found = []
    for i, part in enumerate(parts):
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[i]
        one, keys, values = (t.unsqueeze(0) for t in part)
        found.append(attention(one, keys, values, scale, slopes=own, **options)[0])
    return torch.cat(found)


def _head(
    scores: Tensor,
    v: Tensor,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slope: Tensor | None,
    sink: Tensor | None,
) -> Tensor:
    queries, keys = scores.shape
    results = []
    for i in range(queries):
        at = i + keys - queries  # the last query stands at the last key
        left = -math.inf if window[0] < 0 else at - window[0]
        right = math.inf if window[1] < 0 else at + window[1]
        right = at if causal else right
        seen = [j for j in range(keys) if left <= j <= right]
        row = scores[i, seen]
        if softcap:
            row = softcap * torch.tanh(row / softcap)
        if slope is not None:
            row = row - slope * torch.tensor([abs(at - j) for j in seen], dtype=torch.float64)
        if sink is not None:
            row = torch.cat([row, sink.double().view(1)])
        if not seen:
            results.append(v.new_zeros(v.shape[1]))
        else:
            results.append(row.softmax(0)[: len(seen)] @ v[seen])
    return torch.stack(results) if results else v.new_zeros(0, v.shape[1])
