"""A linear recurrence over chunks, a product a chunk."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .._common.functorch import is_transformed


class States(NamedTuple):
    """Holds what a recurrence went through.

    Attributes:
        before: what it had before each chunk, ``[N, M, K, V]``; backwards that is what is behind it.
        last: what it ended with, ``[M, K, V]``.
    """

    before: Tensor
    last: Tensor


def scan(removed: Tensor, added: Tensor, first: Tensor | None, backwards: bool = False) -> States:
    """Compute ``S ← Aₙ - Rₙ S`` for all chunks n, one after the other, or from the last to the first.

    Args:
        removed: R, ``[N, M, K, K]``.
        added: A, ``[N, M, K, V]``.
        first: what it starts with, ``[M, K, V]`` in float32; None for zeros.
        backwards: from the last chunk to the first.
    """
    order = list(range(added.shape[0]))[:: -1 if backwards else 1]
    start = torch.zeros(added.shape[1:], dtype=added.dtype, device=added.device) if first is None else first
    if torch.compiler.is_compiling() or is_transformed() or torch.is_grad_enabled():
        found = [start]
        for n in order:
            found.append(torch.baddbmm(added[n], removed[n], found[-1], alpha=-1))
        return States(torch.stack(found[:-1][:: -1 if backwards else 1]), found[-1])
    before, last = torch.empty_like(added), torch.empty_like(start)
    before[order[0]].copy_(start)
    of_chunks = list(zip(added.unbind(), removed.unbind(), before.unbind()))  # all at once: a chunk is one call
    for n, following in zip(order, [*order[1:], None]):
        more, factor, state = of_chunks[n]
        behind = last if following is None else of_chunks[following][2]
        torch.sub(more, torch.bmm(factor, state, out=behind), out=behind)
    return States(before, last)
