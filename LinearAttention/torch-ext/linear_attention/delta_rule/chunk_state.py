"""The recurrence of the delta rule from chunk to chunk: one product of matrices for each."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._common.derivatives import is_transformed


class ChunkStates(NamedTuple):
    """Holds the states of a recurrence over chunks.

    Attributes:
        before: the state before each chunk, ``[N, M, K, V]``; backwards, the gradient of the state behind it.
        last: the state behind the last chunk, ``[M, K, V]``; backwards, the gradient of the state before the first.
    """

    before: Tensor
    last: Tensor


def scan_chunks(neg_transition: Tensor, update: Tensor, first: Tensor | None, backwards: bool = False) -> ChunkStates:
    """Compute ``S ← Uₙ - Rₙ S`` for all chunks n, one after the other, or from the last to the first.

    Args:
        neg_transition: R, ``[N, M, K, K]``.
        update: U, ``[N, M, K, V]``.
        first: the state to start with, ``[M, K, V]`` in float32; None for zeros.
        backwards: from the last chunk to the first.
    """
    order = list(range(update.shape[0]))[:: -1 if backwards else 1]
    start = torch.zeros(update.shape[1:], dtype=update.dtype, device=update.device) if first is None else first
    if torch.compiler.is_compiling() or is_transformed() or torch.is_grad_enabled():
        states = [start]
        for n in order:
            states.append(torch.baddbmm(update[n], neg_transition[n], states[-1], alpha=-1))
        return ChunkStates(torch.stack(states[:-1][:: -1 if backwards else 1]), states[-1])
    before, last = torch.empty_like(update), torch.empty_like(start)
    before[order[0]].copy_(start)
    chunks = list(zip(update.unbind(), neg_transition.unbind(), before.unbind()))  # one call for all chunks
    for n, following in zip(order, [*order[1:], None]):
        added, factor, state = chunks[n]
        behind = last if following is None else chunks[following][2]
        torch.sub(added, torch.bmm(factor, state, out=behind), out=behind)
    return ChunkStates(before, last)
