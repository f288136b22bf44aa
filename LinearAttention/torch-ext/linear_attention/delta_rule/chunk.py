"""The chunks of a part of the tokens, computed at once: what one token gives another of its chunk, and the states.

With k, q, v of a chunk as rows, Γ as in the files of gates, e, l and w the decays from the start of the chunk, to its
end and over it, and S the state before the chunk:

    A = (KKᵀ⊙Γ) β below the diagonal     X = (I + A)⁻¹       U = X V       W = X (eK)       P = (QKᵀ⊙Γ) β
    V' = U - W S                         O = eQ S + P V' = (eQ - P W) S + P U
    S⁺ = w S + (βlK)ᵀ V' = (βlK)ᵀ U - ((βlK)ᵀ W - w) S

"Gated Delta Networks" (arXiv 2412.06464) and "Kimi Linear" (arXiv 2510.26692), with V' eliminated, so that a chunk
costs the recurrence one product. β weighs keys where values are added, not the values: its gradient needs no other
products then than those of Γ do.

What is added to a product is added in place behind it: ``baddbmm`` in float32 copies it first, and writes the product
into a workspace, with beta = 1 too (CANN's ops-nn, matmul/batch_mat_mul_v3/op_host/op_api/aclnn_baddbmm.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.chunk_layout import from_chunks, to_chunks
from ..utils.l2norm import unit_factor, unit_gradient
from ..utils.packed_sequences import Bounds
from ..utils.solve_tril import inverse
from . import gdn_intra, kda_intra
from .chunk_state import States, scan
from .decays import Decays, Gates, Led, OfLed, OfProducts, decays, dots, gate_gradients


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


class NormFactors(NamedTuple):
    """Holds what queries and keys are multiplied with on their way into chunks, ``[B, T, G, 1]`` in float32."""

    query: Tensor
    key: Tensor


@dataclass
class Chunks:
    """Holds all of tokens but their values in chunks, in float32.

    Attributes:
        query, key: normalised and scaled, ``[M / shared, C, K]``; M counts chunks, rows and heads.
        beta: ``[M, C, 1]``.
        gates: with G of 1 or K.
        rows: rows times heads.
        shared: how many heads one query and key serve here: with gates of channels each has copies of its own.
    """

    query: Tensor
    key: Tensor
    beta: Tensor
    gates: Gates
    rows: int
    shared: int

    @property
    def kind(self) -> ModuleType:
        """The file that computes products with such gates."""
        return gdn_intra if self.gates.each.shape[-1] == 1 else kda_intra


class Inner(NamedTuple):
    """Holds what a chunk knows without a state, ``[M, C, C]`` each: Γ, ``KKᵀ⊙Γ``, ``QKᵀ⊙Γ`` and X.

    With gates of channels Γ is no matrix, and empty here.
    """

    between: Tensor
    keys: Tensor
    queries: Tensor
    inverse: Tensor


class Used(NamedTuple):
    """Holds more that a backward needs again: eQ - P W, ``[M, C, K]``, and V', ``[M, C, V]``."""

    read: Tensor
    value: Tensor


def factors_of(tokens: Tokens, options: RuleOptions) -> NormFactors:
    """Compute what queries and keys are multiplied with."""
    if options.normalised:
        return NormFactors(unit_factor(tokens.query, options.scale), unit_factor(tokens.key, 1.0))
    shape, device = (*tokens.key.shape[:3], 1), tokens.key.device
    return NormFactors(
        *(torch.full(shape, scale, dtype=torch.float32, device=device) for scale in (options.scale, 1.0))
    )


def chunks_of(tokens: Tokens, factors: NormFactors, bounds: Bounds | None) -> Chunks:
    """Bring all but the values of tokens into chunks."""
    heads = tokens.value.shape[2]
    groups = heads // tokens.key.shape[2]
    copies = groups if tokens.g.shape[-1] > 1 else 1
    query, key = to_chunks(tokens.query, copies, factors.query), to_chunks(tokens.key, copies, factors.key)
    gates, beta = Gates(to_chunks(tokens.g), bounds), to_chunks(tokens.beta.unsqueeze(-1))
    return Chunks(query, key, beta, gates, heads * len(tokens.value), groups // copies)


def inner(chunks: Chunks) -> tuple[Inner, Tensor, Led]:
    """Compute what chunks know without a state, eQ, ``[M, C, K]``, and keys with their decays."""
    between, keys, queries, led_query, led = chunks.kind.products(chunks)
    return Inner(between, keys, queries, inverse(keys * -chunks.beta.transpose(-1, -2))), led_query, led


class _Parts(NamedTuple):
    """Holds more of the equations: P, W, and what a state loses over a chunk, ``[N, rows, K, K]``."""

    weighted: Tensor
    read: Tensor
    removed: Tensor


def _equations(chunks: Chunks, found: Inner, led: Led) -> _Parts:
    weighted, read = found.queries * chunks.beta.transpose(-1, -2), led.read(found.inverse, chunks.shared)
    removed = torch.bmm(led.trailed.transpose(-1, -2), read)
    eye = torch.eye(removed.shape[-1], dtype=removed.dtype, device=removed.device)
    removed.addcmul_(
        eye, led.whole.unsqueeze(-1), value=-1
    )  # nothing writes to a diagonal but the AI CPU: solve_tril.py
    return _Parts(weighted, read, removed.unflatten(0, (-1, chunks.rows)))


def forward(
    chunks: Chunks, found: Inner, led_query: Tensor, led: Led, value: Tensor, state: Tensor | None, keep: bool
) -> tuple[Tensor, States, Used | None]:
    """Compute the results of chunks, and the states around them.

    Args:
        chunks: the tokens.
        found: what they know without a state.
        led_query: eQ, ``[M, C, K]``.
        led: keys with their decays.
        value: of the tokens, ``[M, C, V]``.
        state: the one before them, ``[rows, K, V]``; None for zeros.
        keep: whether a backward follows.

    Returns:
        ``[M, C, V]``, the states, and what the backward takes of it.
    """
    parts = _equations(chunks, found, led)
    new = torch.bmm(found.inverse, value)  # U
    added = torch.bmm(led.trailed.transpose(-1, -2), new)
    states = scan(parts.removed, added.unflatten(0, (-1, chunks.rows)), state)
    read = led_query.sub_(torch.bmm(parts.weighted, parts.read))
    before = states.before.flatten(0, 1)
    out = torch.bmm(parts.weighted, new).add_(torch.bmm(read, before))
    return out, states, Used(read, new.sub_(torch.bmm(parts.read, before))) if keep else None


def last_state(chunks: Chunks, value: Tensor, state: Tensor) -> Tensor:
    """Compute the state behind the chunks of rows of one, from that before them, ``[rows, K, V]``."""
    return forward(chunks, *inner(chunks), value, state, keep=False)[1].last


def backward(
    chunks: Chunks, found: Inner, used: Used, states: Tensor, grad: Tensor, grad_state: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the gradients of the tokens in chunks, and of the state before them.

    A gate between two tokens has the gradient of what the one gives the other, and of nothing else: not of what a token
    gives itself, beside which that of gates that forget nearly everything would lose its digits.

    Args:
        chunks: the tokens.
        found: what they know without a state.
        used: what the forward has made of it.
        states: before each chunk, ``[N, rows, K, V]``.
        grad: the gradient of the results, ``[M, C, V]``.
        grad_state: that of the last state, ``[rows, K, V]``; None for zeros.

    Returns:
        The gradients of query, key, value and beta, two parts of those of gates, and that of the first state.
    """
    edges = decays(chunks.gates)
    grad_new, of_led, of_whole, first = _through_states(chunks, found, used, states, grad, grad_state, edges)
    across = used.value.transpose(-1, -2)
    grad_keys, grad_queries = torch.bmm(grad_new, across), torch.bmm(grad, across)  # of -A and P, without β
    pairs = grad_queries * found.queries
    alone = pairs.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
    pairs.addcmul_(grad_keys, found.keys, value=-1).tril_(-1)
    given = pairs.sum(-2).unsqueeze(-1)
    of_products = OfProducts(grad_keys, grad_queries, pairs, given)
    query, key, sums, kept, passed = chunks.kind.gradients_of_gates(chunks, edges, of_products, found.between, of_led)
    sums[:, -1:] += of_whole
    return query, key, grad_new, given + alone + kept, passed, sums, first


def _through_states(
    chunks: Chunks, found: Inner, used: Used, states: Tensor, grad: Tensor, grad_state: Tensor | None, edges: Decays
) -> tuple[Tensor, OfLed, Tensor, Tensor]:
    """Compute the gradients of values, of what has decays to the bounds of its chunk, of these, and of the first state.

    What it computes on the way is as large as all that follows, and freed before.
    """
    led = chunks.kind.led(chunks, edges)
    parts = _equations(chunks, found, led)
    added = torch.bmm(used.read.transpose(-1, -2), grad).unflatten(0, (-1, chunks.rows))
    grads = scan(parts.removed.transpose(-1, -2), added, grad_state, backwards=True)
    before, behind = states.flatten(0, 1), grads.before.flatten(0, 1)
    grad_value = torch.bmm(parts.weighted.transpose(-1, -2), grad).add_(torch.bmm(led.trailed, behind))
    grad_new = torch.bmm(found.inverse.transpose(-1, -2), grad_value)
    turned = before.transpose(-1, -2)
    of_led = OfLed(
        torch.bmm(grad, turned), torch.bmm(grad_new, turned), torch.bmm(used.value, behind.transpose(-1, -2))
    )
    of_whole = led.whole.unsqueeze(1) * _shared(before, behind, led.whole.shape[-1])
    return grad_new, of_led, of_whole, grads.last


def _shared(before: Tensor, behind: Tensor, size: int) -> Tensor:
    """Compute the gradient of what decays over a whole chunk, ``[M, 1, G]``."""
    if size > 1:
        return dots(before, behind).transpose(-1, -2)
    return torch.bmm(before.flatten(1).unsqueeze(1), behind.flatten(1).unsqueeze(2))


def token_gradients(
    chunks: Chunks,
    tokens: Tokens,
    options: RuleOptions,
    factors: NormFactors,
    grads: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Bring the gradients of chunks into the shapes and dtypes of the tokens; that of the values is of ``dtype``."""
    query, key, value, beta, *of_gates = grads
    batch, length, heads = tokens.value.shape[:3]
    copies = heads // tokens.key.shape[2] // chunks.shared
    if options.normalised:
        query, key = unit_gradient(query, chunks.query, options.scale), unit_gradient(key, chunks.key, 1.0)
    return (
        from_chunks(query, batch, length, tokens.query.dtype, copies, factors.query),
        from_chunks(key, batch, length, tokens.key.dtype, copies, factors.key),
        from_chunks(value, batch, length, dtype),
        gate_gradients(*of_gates, chunks.gates.bounds, batch, length).to(tokens.g.dtype),
        from_chunks(beta, batch, length, tokens.beta.dtype).squeeze(-1),
    )
