"""The gated delta rule over sequences: segments of chunks one after the other, as one node of autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common.functorch import is_transformed
from .._common.second_order import differentiable_once
from ..utils.chunk_layout import CHUNK, from_chunks, to_chunks
from ..utils.packed_sequences import Bounds, bounds
from . import chunk as segment
from .chunk import RuleOptions, Tokens
from .chunk_state import States

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
        out, states, _ = _forward(tokens, state, numbers, options, needed=False, keep=wants_all)
        return out, states[-1].last, _all_of(states, wants_all)
    return _DeltaRule.apply(*tokens, state, numbers, options, wants_all)


class _DeltaRule(torch.autograd.Function):
    """Keeps the tokens without their values, the states between chunks, and of each segment what is in ``_Kept``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, state, numbers, options, wants_all = arguments
        tokens = Tokens(*tensors)
        needed = any(ctx.needs_input_grad)
        out, states, kept = _forward(tokens, state, numbers, options, needed, keep=needed or wants_all)
        if needed:
            query, key, value, g, beta = tokens
            flat = [tensor for part in kept for group in part for tensor in group]
            ctx.save_for_backward(query, key, g, beta, state, numbers, *(around.before for around in states), *flat)
            ctx.options, ctx.segments, ctx.shape, ctx.dtype = options, len(states), value.shape, value.dtype
        if not torch.compiler.is_compiling() and out._is_view():  # nobody could write to one that a node gives
            out = torch.ops.aten._unsafe_view(out, out.shape)
        everywhere = _all_of(states, wants_all)
        ctx.mark_non_differentiable(everywhere)
        ctx.set_materialize_grads(False)
        return out, states[-1].last.clone(), everywhere

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, grad_state: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        query, key, g, beta, state, numbers, *rest = saved
        states, flat = rest[: ctx.segments], rest[ctx.segments :]
        size = len(flat) // ctx.segments
        if grad is None:
            grad = torch.zeros(ctx.shape, dtype=torch.float32, device=key.device)
        found: list[tuple[Tensor, ...]] = []
        parts = list(_segments(Tokens(query, key, grad, g, beta), numbers))  # a gradient in the place of each value
        for n in range(ctx.segments - 1, -1, -1):
            part, limits = parts[n]
            factors, inner, used = _Kept.of(flat[n * size : (n + 1) * size])
            chunks = segment.chunks_of(part, factors, limits)
            in_chunks = to_chunks(part.value)
            *grads, grad_state = segment.backward(chunks, inner, used, states[n], in_chunks, grad_state)
            found.append(segment.token_gradients(chunks, part, ctx.options, factors, tuple(grads), ctx.dtype))
            del grads  # or they would be there while the next segment is computed
        tensors = [_joined(list(one)[::-1]) for one in zip(*found)]
        return *tensors, None if state is None else grad_state, None, None, None


class _Kept(NamedTuple):
    """Holds what a backward needs of a segment beside its tokens and states."""

    factors: segment.NormFactors
    inner: segment.Inner
    used: segment.Used

    @classmethod
    def of(cls, flat: Sequence[Tensor]) -> _Kept:
        """Make it of all tensors in it."""
        factors, inner = len(segment.NormFactors._fields), len(segment.Inner._fields)
        return cls(
            segment.NormFactors(*flat[:factors]),
            segment.Inner(*flat[factors : factors + inner]),
            segment.Used(*flat[factors + inner :]),
        )


def _forward(
    tokens: Tokens, state: Tensor | None, numbers: Tensor | None, options: RuleOptions, needed: bool, keep: bool
) -> tuple[Tensor, list[States], list[_Kept]]:
    """Compute the results, and the states of every segment or of the last one; what a backward needs where it is."""
    results, states, kept = [], [], []
    for part, limits in _segments(tokens, numbers):
        factors = segment.factors_of(part, options)
        chunks = segment.chunks_of(part, factors, limits)
        inner, *led = segment.inner(chunks)
        out, around, used = segment.forward(chunks, inner, *led, to_chunks(part.value), state, needed)
        results.append(from_chunks(out, *part.value.shape[:2], tokens.query.dtype))
        state = around.last
        if used is not None:
            kept.append(_Kept(factors, inner, used))
        if not keep:
            states.clear()
        states.append(around)
    return _joined(results), states, kept


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
