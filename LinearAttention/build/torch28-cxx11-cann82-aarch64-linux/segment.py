"""The chunks of a part of the tokens, computed at once: what one token gives another of its chunk, and the states.

With k, q, v of a chunk as rows, Γ as in the files of gates, e, l and w the decays from the start of the chunk, to its
end and over it, and S the state before the chunk:

    A = β KKᵀ⊙Γ below the diagonal       X = (I + A)⁻¹       U = X βV       W = X β(eK)       P = QKᵀ⊙Γ
    V' = U - W S                         O = eQ S + P V' = (eQ - P W) S + P U
    S⁺ = w S + (lK)ᵀ V' = (w - (lK)ᵀ W) S + (lK)ᵀ U

"Gated Delta Networks" (arXiv 2412.06464) and "Kimi Linear" (arXiv 2510.26692), with V' eliminated, so that a chunk
costs the recurrence one product.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import channel_gates, scalar_gates
from .chunks import from_chunks, to_chunks
from .gates import Decays, decays, summed, summed_back
from .scan import States, scan
from .sequences import Bounds
from .triangle import inverse
from .unit import unit, unit_gradient


class Tokens(NamedTuple):
    """Holds some tokens.

    Query and key are ``[B, T, G, K]``, value ``[B, T, H, V]``, g ``[B, T, H, 1 or K]`` and beta ``[B, T, H]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


class RuleOptions(NamedTuple):
    """Says how queries and keys are used: the scale of the queries, and whether both get length one before."""

    scale: float
    normalised: bool


class Inner(NamedTuple):
    """Holds what a chunk knows without a state, ``[M, C, C]`` each: ``KKᵀ⊙Γ``, P and X of the equations above."""

    keys: Tensor
    queries: Tensor
    inverse: Tensor


@dataclass
class Chunks:
    """Holds tokens in chunks, in float32, with their decays.

    Attributes:
        query, key, value: ``[M, C, K]`` or ``[M, C, V]``, normalised and scaled; M counts chunks, rows and heads.
        beta: ``[M, C, 1]``.
        sums: of gates, ``[M, C, 1 or K]``.
        decays: that follow from them.
        bounds: of packed sequences, None where rows are one sequence.
        rows: rows times heads.
        given: query and key as they were given, and the factors that normalised them; empty without that.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    sums: Tensor
    decays: Decays
    bounds: Bounds | None
    rows: int
    given: tuple[Tensor, ...]

    @property
    def gates(self) -> ModuleType:
        """The file that computes products with such gates."""
        return scalar_gates if self.sums.shape[-1] == 1 else channel_gates


def chunks_of(tokens: Tokens, options: RuleOptions, bounds: Bounds | None) -> Chunks:
    """Bring tokens into chunks."""
    heads = tokens.value.shape[2]
    groups = heads // tokens.key.shape[2]
    query, key, value = to_chunks(tokens.query, groups), to_chunks(tokens.key, groups), to_chunks(tokens.value)
    given: tuple[Tensor, ...] = ()
    if options.normalised:
        (unit_query, of_query), (unit_key, of_key) = unit(query, options.scale), unit(key, 1.0)
        given = (query, of_query, key, of_key)
        query, key = unit_query, unit_key
    else:
        query = query * options.scale
    sums = summed(tokens.g, bounds)
    beta, rows = to_chunks(tokens.beta.unsqueeze(-1)), heads * tokens.value.shape[0]
    return Chunks(query, key, value, beta, sums, decays(sums, bounds), bounds, rows, given)


def inner(chunks: Chunks) -> Inner:
    """Compute what chunks know without a state."""
    keys, queries = chunks.gates.products(chunks.query, chunks.key, chunks.sums, chunks.bounds)
    return Inner(keys, queries, inverse(keys * chunks.beta))


class _Parts(NamedTuple):
    """Holds more of the equations: -eK, eQ, lK, U and -W, and what takes a state over a chunk, ``[N, rows, K, K]``."""

    led_key: Tensor
    led_query: Tensor
    trailed_key: Tensor
    new: Tensor
    read: Tensor
    transitions: Tensor


def _equations(chunks: Chunks, found: Inner) -> _Parts:
    lead, trail, whole = chunks.decays
    led_key, led_query, trailed_key = chunks.key * -lead, chunks.query * lead, chunks.key * trail
    weighted = found.inverse * chunks.beta.transpose(-1, -2)
    new, read = torch.bmm(weighted, chunks.value), torch.bmm(weighted, led_key)
    transitions = torch.bmm(trailed_key.transpose(-1, -2), read)
    transitions.diagonal(dim1=-2, dim2=-1).add_(whole)
    return _Parts(led_key, led_query, trailed_key, new, read, transitions.unflatten(0, (-1, chunks.rows)))


def forward(chunks: Chunks, found: Inner, state: Tensor | None) -> tuple[Tensor, States]:
    """Compute the results of chunks, and the states around them.

    Args:
        chunks: the tokens.
        found: what they know without a state.
        state: the one before them, ``[rows, K, V]``; None for zeros.

    Returns:
        ``[M, C, V]``, and the states.
    """
    parts = _equations(chunks, found)
    states = scan(parts.transitions, parts.trailed_key.transpose(-1, -2), parts.new, state)
    read = torch.baddbmm(parts.led_query, found.queries, parts.read)
    out = torch.baddbmm(torch.bmm(found.queries, parts.new), read, states.before.flatten(0, 1))
    return out, states


def last_state(chunks: Chunks, state: Tensor) -> Tensor:
    """Compute the state behind the chunks of rows of one, from that before them, ``[rows, K, V]``."""
    return forward(chunks, inner(chunks), state)[1].last


def backward(
    chunks: Chunks, found: Inner, states: States, grad: Tensor, grad_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of the tokens in chunks, and of the state before them.

    Args:
        chunks: the tokens.
        found: what they know without a state.
        states: before and behind the chunks.
        grad: the gradient of the results, ``[M, C, V]``.
        grad_state: that of the last state, ``[rows, K, V]``; None for zeros.

    Returns:
        The gradients of query, key, value, beta and the sums of gates, and of the first state.
    """
    parts, (lead, trail, _) = _equations(chunks, found), chunks.decays
    read = torch.baddbmm(parts.led_query, found.queries, parts.read)
    grads = scan(parts.transitions.transpose(-1, -2), read.transpose(-1, -2), grad, grad_state, backwards=True)
    before, behind = states.before.flatten(0, 1), grads.before.flatten(0, 1)
    turned = before.transpose(-1, -2)

    value = torch.baddbmm(parts.new, parts.read, before)  # V'
    grad_value = torch.baddbmm(torch.bmm(found.queries.transpose(-1, -2), grad), parts.trailed_key, behind)
    grad_queries = torch.bmm(grad, value.transpose(-1, -2))
    grad_led_query = torch.bmm(grad, turned)
    grad_trailed_key = torch.bmm(value, behind.transpose(-1, -2))
    solved = found.inverse.transpose(-1, -2)
    grad_new = torch.bmm(solved, grad_value)
    grad_read = torch.bmm(solved, torch.bmm(grad_value, turned))
    grad_lower = torch.baddbmm(
        torch.bmm(grad_new, parts.new.transpose(-1, -2)), grad_read, parts.read.transpose(-1, -2), beta=-1, alpha=-1
    ).tril(-1)
    of_value = (grad_new * chunks.value).sum(-1, keepdim=True)
    grad_beta = of_value + (grad_read * parts.led_key).sum(-1, keepdim=True)
    grad_beta = grad_beta + (grad_lower * found.keys).sum(-1, keepdim=True)
    grad_led_key = grad_read * chunks.beta

    grad_query, grad_key, grad_sums = chunks.gates.product_gradients(
        chunks.query, chunks.key, chunks.sums, chunks.bounds, grad_lower * chunks.beta, grad_queries
    )
    grad_query = torch.addcmul(grad_query, grad_led_query, lead)
    grad_key = torch.addcmul(grad_key, grad_led_key, lead, value=-1)
    grad_key = torch.addcmul(grad_key, grad_trailed_key, trail)
    at_end = _at_end(states, grads)
    if grad_sums is None:
        grad_sums = (grad_query * chunks.query).sum(-1, keepdim=True) - of_value * chunks.beta
        at_end = at_end.sum(-1, keepdim=True)
    else:
        moved = torch.addcmul(grad_led_query * parts.led_query, grad_led_key, parts.led_key)
        grad_sums = grad_sums + torch.addcmul(moved, grad_trailed_key, parts.trailed_key, value=-1)
    grad_sums[:, -1:] += at_end
    return grad_query, grad_key, grad_new * chunks.beta, grad_beta, grad_sums, grads.last


def _at_end(states: States, grads: States) -> Tensor:
    """Compute the gradient of the sum of a whole chunk that comes through the state behind it, ``[M, 1, K]``."""
    half = states.before.shape[0] // 2
    following = (states.before[half:], states.before[1:half], states.last.unsqueeze(0))  # in the order of chunks.py
    of_state = (grads.before[:half], grads.before[half:-1], grads.before[-1:])
    return torch.cat([(a * b).sum(-1) for a, b in zip(following, of_state)]).flatten(0, 1).unsqueeze(1)


def token_gradients(
    chunks: Chunks, tokens: Tokens, options: RuleOptions, grads: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Bring the gradients of chunks into the shapes and dtypes of the tokens."""
    query, key, value, beta, sums = grads
    if options.normalised:
        given_query, of_query, given_key, of_key = chunks.given
        query = unit_gradient(query, given_query, of_query, options.scale)
        key = unit_gradient(key, given_key, of_key, 1.0)
    else:
        query = query * options.scale
    batch, length, heads = tokens.value.shape[:3]
    groups = heads // tokens.key.shape[2]
    return (
        from_chunks(query, batch, length, tokens.query.dtype, groups),
        from_chunks(key, batch, length, tokens.key.dtype, groups),
        from_chunks(value, batch, length, tokens.value.dtype),
        summed_back(sums, chunks.bounds, batch, length).to(tokens.g.dtype),
        from_chunks(beta, batch, length, tokens.beta.dtype).squeeze(-1),
    )
