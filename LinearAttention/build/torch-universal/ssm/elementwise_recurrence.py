"""A linear recurrence of every element by itself, ``h⁺ = a h + b``, which no product of matrices computes.

One launch a token would be many launches of small tensors. So the tokens are split into N chunks of C, and a launch
takes one token of each chunk: first to find what each chunk adds to a state of zeros, then, from chunk to chunk, the
states before the chunks, and then from these the states of all tokens. Tensors of tokens are ``[C, N, ...]`` here, "in
steps": the first tokens of all chunks, the second tokens, and so on, so that what a launch takes lies together. C is
CHUNK, or T where there are fewer tokens. The gradients of states, ``g = c + a⁺ g⁺``, are found so from the last token
to the first.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._common.derivatives import is_transformed

CHUNK = 32  # tokens; one state of each chunk is saved for a backward


def to_steps(x: Tensor, padding: float = 0.0) -> Tensor:
    """Copy ``[B, T, D]`` into steps in float32, ``[C, N, B, D]``; the last chunk is filled up."""
    chunk = min(CHUNK, x.shape[1])
    missing = -x.shape[1] % chunk
    x = nn.functional.pad(x, (0, 0, 0, missing), value=padding) if missing else x
    x = x.unflatten(1, (-1, chunk)).permute(2, 1, 0, 3)
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous()


def from_steps(x: Tensor, length: int) -> Tensor:
    """Copy ``[C, N, B, D]`` back into ``[B, T, D]``."""
    return x.permute(2, 1, 0, 3).flatten(1, 2)[:, :length].contiguous()


def scan_states(decays: Tensor, updates: Tensor, first: Tensor) -> Tensor:
    """Compute ``h ← aₙ h + bₙ`` for all n, one after the other.

    Args:
        decays: a, ``[N, ...]``.
        updates: b, likewise.
        first: the state to start with, ``[...]``.

    Returns:
        That state, and those that follow, ``[N + 1, ...]``.
    """
    if _is_functional():
        found = [first]
        for decay, update in zip(decays, updates):
            found.append(torch.addcmul(update, decay, found[-1]))
        return torch.stack(found)
    states = updates.new_empty((updates.shape[0] + 1, *first.shape))
    states[0].copy_(first)
    for n in range(updates.shape[0]):
        torch.addcmul(updates[n], decays[n], states[n], out=states[n + 1])
    return states


def scan_gradients(decays: Tensor, grads: Tensor, behind: Tensor) -> Tensor:
    """Compute ``gₙ = cₙ + aₙ₊₁ gₙ₊₁`` for all n, from the last to the first.

    Args:
        decays: a, ``[N, ...]``.
        grads: c, the gradient of each state but for what comes from the next one, likewise.
        behind: what the last state gets from the one behind it, ``[...]``.

    Returns:
        g, ``[N, ...]``.
    """
    last = grads.shape[0] - 1
    if _is_functional():
        found = [grads[last] + behind]
        for n in range(last, 0, -1):
            found.append(torch.addcmul(grads[n - 1], decays[n], found[-1]))
        return torch.stack(found[::-1])
    d_states = torch.empty_like(grads)
    torch.add(grads[last], behind, out=d_states[last])
    for n in range(last, 0, -1):
        torch.addcmul(grads[n - 1], decays[n], d_states[n], out=d_states[n - 1])
    return d_states


def states_around_chunks(decays: Tensor, updates: Tensor, chunk_decay: Tensor, first: Tensor) -> Tensor:
    """Compute the states before all chunks, and behind the last one, ``[N + 1, ...]``.

    Args:
        decays: a, ``[C, N, ...]``.
        updates: b, likewise.
        chunk_decay: the decays over whole chunks, ``[N, ...]``.
        first: the state before the first chunk, ``[...]``.
    """
    end = updates[0]
    for n in range(1, updates.shape[0]):
        end = torch.addcmul(updates[n], decays[n], end)
    return scan_states(chunk_decay, end, first)


def gradients_around_chunks(decays: Tensor, grads: Tensor, chunk_decay: Tensor, last: Tensor) -> Tensor:
    """Compute the gradients of the states before the first chunk, and behind all chunks, ``[N + 1, ...]``.

    Args:
        decays: a, ``[C, N, ...]``.
        grads: c, likewise.
        chunk_decay: the decays over whole chunks, ``[N, ...]``.
        last: the gradient of the state behind the last chunk, ``[...]``.
    """
    start = grads[-1]
    for n in range(grads.shape[0] - 1, 0, -1):
        start = torch.addcmul(grads[n - 1], decays[n], start)
    return scan_states(chunk_decay.flip(0), (decays[0] * start).flip(0), last).flip(0)


def _is_functional() -> bool:
    """Tell whether nothing may be written into an existing tensor."""
    return torch.compiler.is_compiling() or is_transformed() or torch.is_grad_enabled()
