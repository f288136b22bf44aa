"""The gated delta rule over sequences: segments of chunks one after the other, as one node of autograd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import segment
from .chunks import CHUNK, from_chunks, to_chunks
from .scan import States
from .segment import RuleOptions, Tokens
from .sequences import Bounds, bounds
from .transforms import is_transformed

BUDGET = 5 * 2**30  # bytes that the chunks of a segment may take while they are computed


def delta_rule(
    tokens: Tokens, state: Tensor | None, numbers: Tensor | None, options: RuleOptions, wants_all: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of all tokens, the state behind them, and the states before all chunks.

    Args:
        tokens: all of them.
        state: the one before them, ``[B * H, K, V]`` in float32; None for zeros.
        numbers: of the sequences, ``[B, T]``; None where each row is one.
        options: scale and norm.
        wants_all: whether the states before chunks are wanted.

    Returns:
        ``[B, T, H, V]`` in the dtype of the query, ``[B * H, K, V]`` and ``[N, B * H, K, V]`` in float32; the last one
        without gradients, and empty where it is not wanted.
    """
    if is_transformed():  # torch.func has rules for all that is in it
        out, states, _ = _forward(tokens, state, numbers, options, keep=wants_all)
        return out, states[-1].last, _all_of(states, wants_all)
    return _DeltaRule.apply(*tokens, state, numbers, options, wants_all)


class _DeltaRule(torch.autograd.Function):
    """Keeps the tokens as they were given, the states between chunks, and what chunks know without a state."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, state, numbers, options, wants_all = arguments
        tokens = Tokens(*tensors)
        needed = any(ctx.needs_input_grad)
        out, states, inners = _forward(tokens, state, numbers, options, keep=needed or wants_all)
        if needed:
            kept = [tensor for found in inners for tensor in found]
            ctx.save_for_backward(*tensors, state, numbers, *(around.before for around in states), *kept)
            ctx.options, ctx.segments = options, len(states)
        everywhere = _all_of(states, wants_all)
        ctx.mark_non_differentiable(everywhere)
        ctx.set_materialize_grads(False)
        return out, states[-1].last.clone(), everywhere

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_state: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        query, key, value, g, beta, state, numbers, *rest = ctx.saved_tensors
        tokens, options = Tokens(query, key, value, g, beta), ctx.options
        states, kept = rest[: ctx.segments], rest[ctx.segments :]
        size = len(kept) // ctx.segments
        found: list[tuple[Tensor, ...]] = []
        parts = list(_segments(tokens, numbers))
        for n in range(ctx.segments - 1, -1, -1):
            part, limits = parts[n]
            chunks = segment.chunks_of(part, options, limits)
            inner = segment.Inner(*kept[n * size : (n + 1) * size])
            if grad is None:
                in_chunks = torch.zeros_like(chunks.value)
            else:
                start = sum(other.value.shape[1] for other, _ in parts[:n])
                in_chunks = to_chunks(grad[:, start : start + part.value.shape[1]])
            *grads, grad_state = segment.backward(chunks, inner, states[n], in_chunks, grad_state)
            found.append(segment.token_gradients(chunks, part, options, tuple(grads)))
        tensors = [_joined(list(one)[::-1]) for one in zip(*found)]
        return *tensors, None if state is None else grad_state, None, None, None


def _forward(
    tokens: Tokens, state: Tensor | None, numbers: Tensor | None, options: RuleOptions, keep: bool
) -> tuple[Tensor, list[States], list[segment.Inner]]:
    """Compute the results, the states of every segment or of the last one, and what each chunk knows without them."""
    results, states, inners = [], [], []
    for part, limits in _segments(tokens, numbers):
        chunks = segment.chunks_of(part, options, limits)
        inner = segment.inner(chunks)
        out, around = segment.forward(chunks, inner, state)
        results.append(from_chunks(out, *part.value.shape[:2], tokens.query.dtype))
        state = around.last
        if keep:
            inners.append(inner)
        else:
            states.clear()
        states.append(around)
    return _joined(results), states, inners


def _segments(tokens: Tokens, numbers: Tensor | None) -> Iterator[tuple[Tokens, Bounds | None]]:
    """Give the tokens in segments of whole chunks that stay below the budget, each with the bounds in it."""
    length = tokens.value.shape[1]
    step = CHUNK * max(1, BUDGET // _bytes_of_a_chunk(tokens))
    start = 0
    while start < length:  # a range would tie a graph to one length
        part = tokens if step >= length else Tokens(*(x[:, start : start + step] for x in tokens))
        if numbers is None:
            yield part, None
        else:
            before = numbers[:, start - 1 : start] if start else None
            yield part, bounds(numbers[:, start : start + step], before)
        start += step


def _bytes_of_a_chunk(tokens: Tokens) -> int:
    """Estimate what the backward holds at most for a chunk of all rows and heads: counted on fake tensors."""
    batch, _, heads, value = tokens.value.shape
    key = tokens.key.shape[-1]
    of_token = (24 if tokens.g.shape[-1] > 1 else 12) * key + 8 * value + 8 * CHUNK
    return 4 * batch * heads * (CHUNK * of_token + 3 * key * value + 3 * key * key)


def _all_of(states: list[States], wanted: bool) -> Tensor:
    """Return the states before all chunks, in the order of tokens."""
    if not wanted:
        return states[-1].last.new_empty(0)
    return _joined([around.before for around in states], 0)


def _joined(parts: list[Tensor], dim: int = 1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
