"""A linear recurrence over chunks, two chunks a product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .transforms import is_transformed


class States(NamedTuple):
    """Holds what a recurrence went through.

    Attributes:
        before: what it had before each chunk, ``[N, M, K, V]``; backwards that is what is behind it.
        last: what it ended with, ``[M, K, V]``.
    """

    before: Tensor
    last: Tensor


def scan(transitions: Tensor, left: Tensor, right: Tensor, first: Tensor | None, backwards: bool = False) -> States:
    """Compute ``S ← Tₙ S + (L R)ₙ`` for all chunks n, one after the other, or from the last to the first.

    The chunks are in the order of chunks.py. Both of a pair are joined, all pairs at once:
    ``T' (T S + B) + B' = (T' T) S + (T' B + B')``. So the recurrence has a product a pair, and what is between the two
    follows for all pairs at once.

    Args:
        transitions: T, ``[N, M, K, K]``.
        left: L, ``[N * M, K, C]``.
        right: R, ``[N * M, C, V]``.
        first: what it starts with, ``[M, K, V]`` in float32; None for zeros.
        backwards: from the last chunk to the first.
    """
    chunks, rows = transitions.shape[:2]
    shape, pairs = (rows, left.shape[-2], right.shape[-1]), chunks // 2
    one, other = (slice(pairs, None), slice(0, pairs)) if backwards else (slice(0, pairs), slice(pairs, None))
    added = torch.bmm(left, right).unflatten(0, (chunks, rows))
    flat, far = transitions[one].flatten(0, 1), transitions[other].flatten(0, 1)
    joined = torch.bmm(far, flat).unflatten(0, (pairs, rows))
    behind = torch.baddbmm(added[other].flatten(0, 1), far, added[one].flatten(0, 1)).unflatten(0, (pairs, rows))
    order = list(range(pairs))[:: -1 if backwards else 1]
    start = torch.zeros(shape, dtype=right.dtype, device=right.device) if first is None else first
    if torch.compiler.is_compiling() or is_transformed() or torch.is_grad_enabled():
        found = [start]
        for n in order:
            found.append(torch.baddbmm(behind[n], joined[n], found[-1]))
        states = torch.stack(found[:-1][:: -1 if backwards else 1])
        between = torch.baddbmm(added[one].flatten(0, 1), flat, states.flatten(0, 1)).unflatten(0, (pairs, rows))
        return States(torch.cat([between, states] if backwards else [states, between]), found[-1])
    before, last = right.new_empty((chunks, *shape)), right.new_empty(shape)
    states = before[one]
    states[order[0]].copy_(start)
    for n, following in zip(order, [*order[1:], None]):
        torch.baddbmm(behind[n], joined[n], states[n], out=last if following is None else states[following])
    torch.baddbmm(added[one].flatten(0, 1), flat, states.flatten(0, 1), out=before[other].flatten(0, 1))
    return States(before, last)
