"""A linear recurrence over chunks, one product a chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from .transforms import is_transformed


def scan(transitions: Tensor, left: Tensor, right: Tensor, first: Tensor | None, backwards: bool = False) -> Tensor:
    """Compute ``Sₙ₊₁ = Tₙ Sₙ + (L R)ₙ`` for all n; backwards ``Sₙ = Tₙ Sₙ₊₁ + (L R)ₙ``.

    Args:
        transitions: T, ``[N, M, K, K]``.
        left: L, ``[N * M, K, C]``.
        right: R, ``[N * M, C, V]``.
        first: S₀, or Sₙ of the last n when backwards, ``[M, K, V]`` in float32; None for zeros.
        backwards: from the last chunk to the first.

    Returns:
        ``[N + 1, M, K, V]``, the state before each chunk, and that behind the last one.
    """
    chunks, rows = transitions.shape[:2]
    shape = (rows, left.shape[-2], right.shape[-1])
    order = range(chunks - 1, -1, -1) if backwards else range(chunks)
    if torch.compiler.is_compiling() or is_transformed() or torch.is_grad_enabled():
        state = right.new_zeros(shape) if first is None else first
        states, added = [state], torch.bmm(left, right).unflatten(0, (chunks, rows)).unbind()
        for n in order:
            states.append(torch.baddbmm(added[n], transitions[n], states[-1]))
        return torch.stack(states[::-1] if backwards else states)
    found = right.new_empty((chunks + 1, *shape))
    start, rest = (found[-1], found[:-1]) if backwards else (found[0], found[1:])
    start.zero_() if first is None else start.copy_(first)
    torch.bmm(left, right, out=rest.flatten(0, 1))
    for n in order:
        known, wanted = (found[n + 1], found[n]) if backwards else (found[n], found[n + 1])
        wanted.baddbmm_(transitions[n], known)
    return found
