"""A linear recurrence of every element by itself, ``h⁺ = a h + b``: no product of matrices computes it.

One token after the other it would be a launch a token, of small tensors. Chunks of tokens are walked through at once, a
token of each chunk a step: first for what each chunk adds to a state of zeros, then from chunk to chunk, and then again
from the states before the chunks. Tensors of tokens are ``[C, N, ...]`` here, the first tokens of all N chunks, the
second tokens, and so on: a step takes what lies together. C is CHUNK, or T where there are fewer tokens. Backwards the
same is done for ``g = c + a⁺ g⁺``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._common.functorch import is_transformed

CHUNK = 32  # tokens: a gradient keeps one state of each chunk


def in_steps(x: Tensor, filling: float = 0.0) -> Tensor:
    """Copy ``[B, T, D]`` into steps in float32, ``[C, N, B, D]``; the last chunk is filled up."""
    chunk = min(CHUNK, x.shape[1])
    missing = -x.shape[1] % chunk
    x = nn.functional.pad(x, (0, 0, 0, missing), value=filling) if missing else x
    x = x.unflatten(1, (-1, chunk)).permute(2, 1, 0, 3)
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def from_steps(x: Tensor, length: int) -> Tensor:
    """Copy ``[C, N, B, D]`` back into ``[B, T, D]``."""
    return x.permute(2, 1, 0, 3).flatten(1, 2)[:, :length].contiguous()


def states(decays: Tensor, added: Tensor, first: Tensor) -> Tensor:
    """Compute ``h ← aₙ h + bₙ`` for all n, one after the other.

    Args:
        decays: a, ``[N, ...]``.
        added: b, likewise.
        first: what it starts with, ``[...]``.

    Returns:
        What it starts with, and what follows, ``[N + 1, ...]``.
    """
    if _is_functional():
        found = [first]
        for decay, more in zip(decays, added):
            found.append(torch.addcmul(more, decay, found[-1]))
        return torch.stack(found)
    walked = added.new_empty((added.shape[0] + 1, *first.shape))
    walked[0].copy_(first)
    for n in range(added.shape[0]):
        torch.addcmul(added[n], decays[n], walked[n], out=walked[n + 1])
    return walked


def state_gradients(decays: Tensor, added: Tensor, behind: Tensor) -> Tensor:
    """Compute ``gₙ = cₙ + aₙ₊₁ gₙ₊₁`` for all n, from the last to the first.

    Args:
        decays: a, ``[N, ...]``.
        added: c, likewise.
        behind: what the last one gets besides, ``[...]``.

    Returns:
        g, ``[N, ...]``.
    """
    last = added.shape[0] - 1
    if _is_functional():
        found = [added[last] + behind]
        for n in range(last, 0, -1):
            found.append(torch.addcmul(added[n - 1], decays[n], found[-1]))
        return torch.stack(found[::-1])
    walked = torch.empty_like(added)
    torch.add(added[last], behind, out=walked[last])
    for n in range(last, 0, -1):
        torch.addcmul(added[n - 1], decays[n], walked[n], out=walked[n - 1])
    return walked


def before_chunks(decays: Tensor, added: Tensor, whole: Tensor, first: Tensor) -> Tensor:
    """Compute the states before all chunks, and behind the last one, ``[N + 1, ...]``.

    Args:
        decays: a, ``[C, N, ...]``.
        added: b, likewise.
        whole: the decays over chunks, ``[N, ...]``.
        first: the state before the first chunk, ``[...]``.
    """
    end = added[0]
    for n in range(1, added.shape[0]):
        end = torch.addcmul(added[n], decays[n], end)
    return states(whole, end, first)


def behind_chunks(decays: Tensor, added: Tensor, whole: Tensor, last: Tensor) -> Tensor:
    """Compute the gradients of the states before the first chunk, and behind all chunks, ``[N + 1, ...]``.

    Args:
        decays: a, ``[C, N, ...]``.
        added: c, likewise.
        whole: the decays over chunks, ``[N, ...]``.
        last: the gradient of the state behind the last chunk, ``[...]``.
    """
    grad = added[-1]
    for n in range(added.shape[0] - 1, 0, -1):
        grad = torch.addcmul(added[n - 1], decays[n], grad)
    return states(whole.flip(0), (decays[0] * grad).flip(0), last).flip(0)


def _is_functional() -> bool:
    """Tell whether nothing can be written into a tensor that is there."""
    return torch.compiler.is_compiling() or is_transformed() or torch.is_grad_enabled()
