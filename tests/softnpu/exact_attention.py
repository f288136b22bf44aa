"""Attention in float64, for what operators of attention have to give."""

import math

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
