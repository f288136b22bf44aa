"""The delta rule over whole sequences: segments of chunks one after the other, as one node of autograd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common.derivatives import is_transformed
from .._common.second_order import differentiable_once
from ..utils.chunk_layout import CHUNK, from_chunks, to_chunks
from ..utils.packed_sequences import SequenceMasks, sequence_masks
from . import chunk
from .tokens import DeltaRuleOptions, NormFactors, Tokens, chunk_tokens, norm_factors, token_gradients

BUDGET = 5 * 2**30  # bytes that the chunks of a segment may take while they are computed


def chunk_delta_rule(
    tokens: Tokens,
    state: Tensor | None,
    seq_idx: Tensor | None,
    options: DeltaRuleOptions,
    wants_chunk_states: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the results of all tokens, the state behind them, and the states before all chunks.

    Args:
        tokens: the arguments with a value for each token.
        state: before the first token, ``[B * H, K, V]`` in float32; None for zeros.
        seq_idx: the number of the sequence of each token, ``[B, T]``; None where each row is one sequence.
        options: scale and norm.
        wants_chunk_states: whether the states before chunks are returned.

    Returns:
        ``[B, T, H, V]`` in the dtype of the query, ``[B * H, K, V]`` and ``[N, B * H, K, V]`` in float32; the last one
        without gradients, and empty where it is not wanted.
    """
    if is_transformed():  # a node of autograd would be opaque to torch.func, and torch's operators are not
        out, states, _ = _forward(tokens, state, seq_idx, options, needs_backward=False, keep_states=wants_chunk_states)
        return out, states[-1].last, _states_before_chunks(states, wants_chunk_states)
    return _DeltaRule.apply(*tokens, state, seq_idx, options, wants_chunk_states)


class _DeltaRule(torch.autograd.Function):
    """Saves the tokens without their values, the states between chunks, and a ``_Saved`` for each segment."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, state, seq_idx, options, wants_chunk_states = arguments
        tokens = Tokens(*tensors)
        needed = any(ctx.needs_input_grad)
        out, states, saved = _forward(tokens, state, seq_idx, options, needed, needed or wants_chunk_states)
        if needed:
            query, key, value, g, beta = tokens
            flat = [tensor for segment in saved for group in segment for tensor in group]
            ctx.save_for_backward(query, key, g, beta, state, seq_idx, *(one.before for one in states), *flat)
            ctx.options, ctx.segments, ctx.shape, ctx.dtype = options, len(states), value.shape, value.dtype
        if not torch.compiler.is_compiling() and out._is_view():  # which nobody could write to in place
            out = torch.ops.aten._unsafe_view(out, out.shape)
        chunk_states = _states_before_chunks(states, wants_chunk_states)
        ctx.mark_non_differentiable(chunk_states)
        ctx.set_materialize_grads(False)
        return out, states[-1].last.clone(), chunk_states

    @staticmethod
    @differentiable_once
    def backward(
        ctx: Any, saved: tuple[Tensor, ...], grad: Tensor | None, grad_state: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        query, key, g, beta, state, seq_idx, *rest = saved
        states, flat = rest[: ctx.segments], rest[ctx.segments :]
        size = len(flat) // ctx.segments
        if grad is None:
            grad = torch.zeros(ctx.shape, dtype=torch.float32, device=key.device)
        found: list[tuple[Tensor, ...]] = []
        segments = list(_segments(Tokens(query, key, grad, g, beta), seq_idx))  # a gradient in the place of each value
        for n in range(ctx.segments - 1, -1, -1):
            tokens, masks = segments[n]
            factors, intra, outputs = _Saved.from_tensors(flat[n * size : (n + 1) * size])
            chunks = chunk_tokens(tokens, factors, masks)
            grad_chunks = to_chunks(tokens.value)
            *grads, grad_state = chunk.backward(chunks, intra, outputs, states[n], grad_chunks, grad_state)
            found.append(token_gradients(chunks, tokens, ctx.options, factors, tuple(grads), ctx.dtype))
            del grads  # otherwise they would be in memory while the next segment is computed
        tensors = [_cat(list(one)[::-1]) for one in zip(*found)]
        return *tensors, None if state is None else grad_state, None, None, None


class _Saved(NamedTuple):
    """Holds what a backward reads of a segment besides its tokens and states."""

    factors: NormFactors
    intra: chunk.IntraChunk
    outputs: chunk.SavedOutputs

    @classmethod
    def from_tensors(cls, flat: Sequence[Tensor]) -> _Saved:
        """Make it of its tensors in their order."""
        factors, intra = len(NormFactors._fields), len(chunk.IntraChunk._fields)
        return cls(
            NormFactors(*flat[:factors]),
            chunk.IntraChunk(*flat[factors : factors + intra]),
            chunk.SavedOutputs(*flat[factors + intra :]),
        )


def _forward(
    tokens: Tokens,
    state: Tensor | None,
    seq_idx: Tensor | None,
    options: DeltaRuleOptions,
    needs_backward: bool,
    keep_states: bool,
) -> tuple[Tensor, list[chunk.ChunkStates], list[_Saved]]:
    """Compute the results, the states of each segment or of the last one, and what a backward reads, if one follows."""
    results, states, saved = [], [], []
    for segment, masks in _segments(tokens, seq_idx):
        factors = norm_factors(segment, options)
        chunks = chunk_tokens(segment, factors, masks)
        intra, *decayed = chunk.intra_chunk(chunks)
        out, segment_states, outputs = chunk.forward(
            chunks, intra, *decayed, to_chunks(segment.value), state, needs_backward
        )
        results.append(from_chunks(out, *segment.value.shape[:2], tokens.query.dtype))
        state = segment_states.last
        if outputs is not None:
            saved.append(_Saved(factors, intra, outputs))
        if not keep_states:
            states.clear()
        states.append(segment_states)
    return _cat(results), states, saved


def _segments(tokens: Tokens, seq_idx: Tensor | None) -> Iterator[tuple[Tokens, SequenceMasks | None]]:
    """Split the tokens into segments of whole chunks that stay below the budget, each with its masks."""
    length = tokens.value.shape[1]
    step = CHUNK * max(1, BUDGET // _chunk_bytes(tokens))
    start = 0
    while start < length:  # a range would tie a graph to one length
        segment = tokens if step >= length else Tokens(*(x[:, start : start + step] for x in tokens))
        if seq_idx is None:
            yield segment, None
        else:
            previous = seq_idx[:, start - 1 : start] if start else None
            yield segment, sequence_masks(seq_idx[:, start : start + step], previous)
        start += step


def _chunk_bytes(tokens: Tokens) -> int:
    """Estimate the bytes that a backward holds at most for one chunk of all rows and heads: counted on fake tensors."""
    batch, _, heads, value = tokens.value.shape
    key = tokens.key.shape[-1]
    token_floats = (24 if tokens.g.shape[-1] > 1 else 12) * key + 8 * value + 8 * CHUNK
    return 4 * batch * heads * (CHUNK * token_floats + 3 * key * value + 3 * key * key)


def _states_before_chunks(states: list[chunk.ChunkStates], wanted: bool) -> Tensor:
    """Return the states before the chunks of all segments, or an empty tensor where they are not wanted."""
    if not wanted:
        return states[-1].last.new_empty(0)
    return _cat([one.before for one in states], 0)


def _cat(parts: list[Tensor], dim: int = 1) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
