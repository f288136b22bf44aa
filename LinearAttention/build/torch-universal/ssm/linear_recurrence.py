"""The recurrence ``h⁺ = a h + b`` of every channel by itself, as in Griffin's real-gated linear recurrent unit.

"Griffin" (arXiv 2402.19427), equation 4, whose decays and inputs are given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._common.arguments import check_tensors, empty_result, narrowed
from .._common.autocast import without_autocast
from .._common.derivatives import is_transformed
from .._common.second_order import differentiable_once
from .elementwise_recurrence import (
    from_steps,
    gradients_around_chunks,
    scan_gradients,
    scan_states,
    states_around_chunks,
    to_steps,
)


def linear_recurrence(decays: Tensor, added: Tensor, initial_state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute ``h⁺ = a h + b`` for all tokens, in float32.

    It is the loop of RecurrentGemmaRglru of transformers, models/recurrent_gemma/modeling_recurrent_gemma.py, with all
    chunks of tokens at once. Differentiable once, as one node that keeps its arguments and one state a chunk. Under
    torch.func it is differentiable as often as torch's own operators are.

    Args:
        decays: a, ``[B, T, D]``, of a floating dtype; 0 where a sequence begins.
        added: b, likewise.
        initial_state: the state before the first token, ``[B, D]``; None for zeros.

    Returns:
        All states, ``[B, T, D]`` in the dtype of ``added``, and the last one, ``[B, D]`` in float32.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: an argument is not floating point.
    """
    _check(decays, added, initial_state)
    if initial_state is None:
        initial_state = added.new_zeros((added.shape[0], added.shape[2]), dtype=torch.float32)
    decays, added, initial_state = (narrowed(x) for x in (decays, added, initial_state))  # type: ignore[assignment]
    if not added.numel():
        out = empty_result(decays, added, initial_state, shape=added.shape, dtype=added.dtype)
        return out, initial_state.float() + out.float().sum()
    with without_autocast(added):
        if added.shape[1] == 1:  # a step of decoding
            state = torch.addcmul(added[:, 0].float(), decays[:, 0].float(), initial_state.float())
            return state.to(added.dtype).unsqueeze(1), state
        if is_transformed():  # a node of autograd would be opaque to torch.func, and torch's operators are not
            return _forward(decays, added, initial_state)[:2]
        return _LinearRecurrence.apply(decays, added, initial_state)


class BoundedSqrt(torch.autograd.Function):
    """Computes ``sqrt(x)`` of numbers that are not negative, with a derivative of at most 1,000."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sqrt()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / (4.0 * x).clip(min=1 / 1000.0**2).sqrt()


class _LinearRecurrence(torch.autograd.Function):
    """Saves the arguments as they were given, and the states between chunks."""

    @staticmethod
    def forward(ctx: Any, decays: Tensor, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, last, chunk_states = _forward(decays, added, state)
        ctx.save_for_backward(decays, added, chunk_states)
        ctx.state_dtype = state.dtype
        ctx.set_materialize_grads(False)
        return out, last

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, grad_last: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        decays, added, chunk_states = saved
        grads = to_steps(torch.zeros_like(added) if grad is None else grad)
        grad_last = torch.zeros_like(chunk_states[-1]) if grad_last is None else grad_last
        a, b, chunk_decay = _steps(decays, added)
        d_chunk_states = gradients_around_chunks(a, grads, chunk_decay, grad_last)
        d_states = scan_gradients(a, grads, d_chunk_states[1:])
        d_decays = d_states * scan_states(a, b, chunk_states[:-1])[:-1]
        d_tokens = (from_steps(x, added.shape[1]) for x in (d_decays, d_states))
        d_decays, d_added = (x.to(tensor.dtype) for x, tensor in zip(d_tokens, (decays, added)))
        return d_decays, d_added, d_chunk_states[0].to(ctx.state_dtype)


def _forward(decays: Tensor, added: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b, chunk_decay = _steps(decays, added)
    chunk_states = states_around_chunks(a, b, chunk_decay, state.float())
    states = from_steps(scan_states(a, b, chunk_states[:-1])[1:], added.shape[1])
    return states.to(added.dtype), chunk_states[-1].clone(), chunk_states


def _steps(decays: Tensor, added: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return decays and inputs in steps, and the decays over chunks; padded tokens leave a state as it is."""
    a = to_steps(decays, 1.0)
    return a, to_steps(added), a.prod(0)


def _check(decays: Tensor, added: Tensor, state: Tensor | None) -> None:
    """Raise what :func:`linear_recurrence` documents, for arguments that do not fit."""
    check_tensors(decays=decays, added=added, initial_state=state)
    fits = added.dim() == 3 and decays.shape == added.shape
    if not fits or (state is not None and state.shape != (added.shape[0], added.shape[2])):
        named = {"decays": decays, "added": added, "initial_state": state}
        found = ", ".join(f"{name} {list(x.shape)}" for name, x in named.items() if x is not None)
        raise ValueError(f"decays and added [B, T, D], and initial_state [B, D] have to fit: {found}")
