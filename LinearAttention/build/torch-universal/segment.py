"""The chunks of a part of the tokens, computed at once: what one token gives another of its chunk, and the states.

With k, q, v of a chunk as rows, Γ as in the files of gates, e, l and w the decays from the start of the chunk, to its
end and over it, and S the state before the chunk:

    A = (KKᵀ⊙Γ) β below the diagonal     X = (I + A)⁻¹       U = X V       W = X (eK)       P = (QKᵀ⊙Γ) β
    V' = U - W S                         O = eQ S + P V' = (eQ - P W) S + P U
    S⁺ = w S + (βlK)ᵀ V' = (βlK)ᵀ U - ((βlK)ᵀ W - w) S

"Gated Delta Networks" (arXiv 2412.06464) and "Kimi Linear" (arXiv 2510.26692), with V' eliminated, so that a chunk
costs the recurrence one product. β weighs keys where values are added, not the values: its gradient needs no other
products then than those of Γ do.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from . import channel_gates, scalar_gates
from .chunks import from_chunks, to_chunks
from .gates import Decays, Gates, decays, dots, gates_of, summed_back
from .scan import States, scan
from .sequences import Bounds
from .triangle import inverse
from .unit import inverse_rms, unit_gradient, weight_of


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
    """Holds what a chunk knows without a state, ``[M, C, C]`` each: ``KKᵀ⊙Γ``, ``QKᵀ⊙Γ`` and X."""

    keys: Tensor
    queries: Tensor
    inverse: Tensor


@dataclass
class Chunks:
    """Holds tokens in chunks, in float32, with their decays.

    Attributes:
        query, key, value: ``[M, C, K]`` or ``[M, C, V]``, normalised and scaled; M counts chunks, rows and heads.
        beta: ``[M, C, 1]``.
        gates: with G of 1 or K.
        decays: that follow from them.
        rows: rows times heads.
        inverses: of the root mean squares of query and key, ``[B, T, G, 1]``; empty where they keep their lengths.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    gates: Gates
    decays: Decays
    rows: int
    inverses: tuple[Tensor, ...]

    @property
    def kind(self) -> ModuleType:
        """The file that computes products with such gates."""
        return scalar_gates if self.gates.each.shape[-1] == 1 else channel_gates


def chunks_of(tokens: Tokens, options: RuleOptions, bounds: Bounds | None) -> Chunks:
    """Bring tokens into chunks."""
    heads = tokens.value.shape[2]
    groups = heads // tokens.key.shape[2]
    inverses: tuple[Tensor, ...] = ()
    if options.normalised:
        inverses = of_query, of_key = inverse_rms(tokens.query), inverse_rms(tokens.key)
        query = to_chunks(tokens.query, groups, of_query * weight_of(tokens.query, options.scale))
        key = to_chunks(tokens.key, groups, of_key * weight_of(tokens.key, 1.0))
    else:
        query, key = to_chunks(tokens.query, groups) * options.scale, to_chunks(tokens.key, groups)
    gates, value, beta = gates_of(tokens.g, bounds), to_chunks(tokens.value), to_chunks(tokens.beta.unsqueeze(-1))
    return Chunks(query, key, value, beta, gates, decays(gates), heads * len(tokens.value), inverses)


def inner(chunks: Chunks) -> Inner:
    """Compute what chunks know without a state."""
    keys, queries = chunks.kind.products(chunks.query, chunks.key, chunks.gates)
    return Inner(keys, queries, inverse(keys * chunks.beta.transpose(-1, -2)))


class _Parts(NamedTuple):
    """Holds more of the equations: eQ, βlK, P, U, W, and what a state loses over a chunk, ``[N, rows, K, K]``."""

    led_query: Tensor
    trailed_key: Tensor
    weighted: Tensor
    new: Tensor
    read: Tensor
    removed: Tensor


def _equations(chunks: Chunks, found: Inner) -> _Parts:
    lead, trail, whole = chunks.decays
    weighted = found.queries * chunks.beta.transpose(-1, -2)
    led_query, trailed_key = chunks.query * lead, chunks.key * (trail * chunks.beta)
    new, read = torch.bmm(found.inverse, chunks.value), chunks.kind.read(found.inverse, chunks.key, lead)
    removed = torch.bmm(trailed_key.transpose(-1, -2), read)
    removed.diagonal(dim1=-2, dim2=-1).sub_(whole)
    return _Parts(led_query, trailed_key, weighted, new, read, removed.unflatten(0, (-1, chunks.rows)))


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
    added = torch.bmm(parts.trailed_key.transpose(-1, -2), parts.new)
    states = scan(parts.removed, added.unflatten(0, (-1, chunks.rows)), state)
    read = torch.baddbmm(parts.led_query, parts.weighted, parts.read, alpha=-1)
    out = torch.baddbmm(torch.bmm(parts.weighted, parts.new), read, states.before.flatten(0, 1))
    return out, states


def last_state(chunks: Chunks, state: Tensor) -> Tensor:
    """Compute the state behind the chunks of rows of one, from that before them, ``[rows, K, V]``."""
    return forward(chunks, inner(chunks), state)[1].last


def backward(
    chunks: Chunks, found: Inner, states: Tensor, grad: Tensor, grad_state: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of the tokens in chunks, and of the state before them.

    A gate between two tokens has the gradient of what the one gives the other, and of nothing else: not of what a token
    gives itself, beside which that of gates that forget nearly everything would lose its digits.

    Args:
        chunks: the tokens.
        found: what they know without a state.
        states: before each chunk, ``[N, rows, K, V]``.
        grad: the gradient of the results, ``[M, C, V]``.
        grad_state: that of the last state, ``[rows, K, V]``; None for zeros.

    Returns:
        The gradients of query, key, value, beta and the sums of gates, and of the first state.
    """
    parts, kind, beta = _equations(chunks, found), chunks.kind, chunks.beta
    read = torch.baddbmm(parts.led_query, parts.weighted, parts.read, alpha=-1)
    added = torch.bmm(read.transpose(-1, -2), grad).unflatten(0, (-1, chunks.rows))
    grads = scan(parts.removed.transpose(-1, -2), added, grad_state, backwards=True)
    before, behind = states.flatten(0, 1), grads.before.flatten(0, 1)

    value = torch.baddbmm(parts.new, parts.read, before, alpha=-1)  # V'
    grad_value = torch.bmm(parts.weighted.transpose(-1, -2), grad)
    grad_value = torch.baddbmm(grad_value, parts.trailed_key, behind)
    grad_new = torch.bmm(found.inverse.transpose(-1, -2), grad_value)
    across = value.transpose(-1, -2)
    grad_keys, grad_queries = torch.bmm(grad_new, across), torch.bmm(grad, across)  # of -A and P, without β
    turned = before.transpose(-1, -2)
    of_states = torch.bmm(grad, turned), torch.bmm(grad_new, turned), torch.bmm(value, behind.transpose(-1, -2))

    pairs = grad_queries * found.queries
    alone = pairs.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
    pairs = torch.addcmul(pairs, grad_keys, found.keys, value=-1)
    pairs.diagonal(dim1=-2, dim2=-1).zero_()
    given = pairs.sum(-2).unsqueeze(-1)
    query, key, sums = kind.product_gradients(chunks.query, chunks.key, chunks.gates, beta, grad_keys, grad_queries)
    if sums is None:
        sums = torch.bmm(pairs, beta) - beta * given
    inside = query, key, sums
    query, key, sums, kept = kind.decay_gradients(chunks.query, chunks.key, beta, chunks.decays, inside, of_states)
    grad_beta = given + alone + kept.sum(-1, keepdim=True)
    kept = kept * beta
    sums = sums - kept
    of_whole = chunks.decays.whole.unsqueeze(1) * _shared(before, behind, sums.shape[-1])
    sums[:, -1:] += kept.sum(1, keepdim=True) + of_whole
    return query, key, grad_new, grad_beta, sums, grads.last


def _shared(before: Tensor, behind: Tensor, size: int) -> Tensor:
    """Compute the gradient of what decays over a whole chunk, ``[M, 1, G]``."""
    if size > 1:
        return dots(before, behind).transpose(-1, -2)
    return torch.bmm(before.flatten(1).unsqueeze(1), behind.flatten(1).unsqueeze(2))


def token_gradients(
    chunks: Chunks, tokens: Tokens, options: RuleOptions, grads: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Bring the gradients of chunks into the shapes and dtypes of the tokens."""
    query, key, value, beta, sums = grads
    batch, length, heads = tokens.value.shape[:3]
    groups = heads // tokens.key.shape[2]
    if options.normalised:
        of_query, of_key = (to_chunks(each, groups) for each in chunks.inverses)
        query = unit_gradient(query, to_chunks(tokens.query, groups), of_query, options.scale)
        key = unit_gradient(key, to_chunks(tokens.key, groups), of_key, 1.0)
    else:
        query = query * options.scale
    return (
        from_chunks(query, batch, length, tokens.query.dtype, groups),
        from_chunks(key, batch, length, tokens.key.dtype, groups),
        from_chunks(value, batch, length, tokens.value.dtype),
        summed_back(sums, chunks.gates.bounds, batch, length).to(tokens.g.dtype),
        from_chunks(beta, batch, length, tokens.beta.dtype).squeeze(-1),
    )
