"""Attention in float64, with one score for every query and key, from flash-attn's description of its parameters."""

from __future__ import annotations

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
    """Compute ``[B, S_q, N, D_v]`` of ``[B, S, N, D]`` in float64; a query that sees no key gives zeros."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    at = torch.arange(q.shape[2]).unsqueeze(1) + k.shape[2] - q.shape[2]  # the last query stands at the last key
    ahead = torch.arange(k.shape[2]) - at
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones_like(ahead, dtype=torch.bool)
    if left >= 0:
        seen &= ahead >= -left
    if right >= 0:
        seen &= ahead <= right
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes.double().view(-1, q.shape[1], 1, 1) * ahead.abs()
    scores = scores.masked_fill(~seen & seen.any(-1, keepdim=True), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.softmax(-1)[..., : k.shape[2]] * seen
    return (weights @ v).transpose(1, 2)


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
