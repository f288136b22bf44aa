"""Attention in float64, for what operators of attention have to give."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor | None = None,
    before: Tensor | float = 0.0,
    behind: Tensor | float = 0.0,
    sink: Tensor | None = None,
    scale: float = 0.3,
) -> tuple[Tensor, Tensor]:
    """Return the result, ``[..., N, S, D]``, with zeros in rows that see nothing, and the log of the sums of exponents.

    A bias is added before the scaling, and one behind.
    """
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = (q @ k.mT + before) * scale + behind
    if hidden is not None:
        scores = scores.masked_fill(hidden, -math.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.double().view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., : k.shape[-2]]
    return weights @ v, scores.logsumexp(-1, keepdim=True)


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in shapes]


def distance(s_q: int, s_k: int, shift: int = 0) -> Tensor:
    """Return how far a key is behind a query, ``[S_q, S_k]``."""
    return torch.arange(s_k) - torch.arange(s_q).unsqueeze(-1) - shift


def sequences(q_lengths, k_lengths, hidden=None, before=None, behind=None) -> Callable[..., Tensor]:
    """Return the truth for TND: ``hidden`` and the biases are functions of a sequence's number."""

    def expected(q, k, v, q_rope=None, k_rope=None) -> Tensor:
        if q_rope is not None:
            q, k = torch.cat([q, q_rope], -1), torch.cat([k, k_rope], -1)
        parts = []
        splits = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths))
        for i, (a, b, c) in enumerate(splits):
            extra = [f(i) if f else default for f, default in ((hidden, None), (before, 0), (behind, 0))]
            parts.append(attend(*(t.transpose(0, 1) for t in (a, b, c)), *extra)[0].transpose(0, 1))
        return torch.cat(parts)

    return expected


def arranged(t: Tensor, layout: str) -> Tensor:
    """Return a contiguous tensor in a layout, given BNSD."""
    axes = {"BNSD": (0, 1, 2, 3), "NBSD": (1, 0, 2, 3), "SBH": (2, 0, 1, 3)}.get(layout, (0, 2, 1, 3))
    t = t.permute(axes)
    return (t.flatten(2) if layout.endswith("H") else t).contiguous()
