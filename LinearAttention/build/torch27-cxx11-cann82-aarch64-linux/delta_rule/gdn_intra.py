"""Products of keys and queries within chunks where a head has one gate a token: the gated delta rule.

Heads that share a query and a key share their products as well, and differ in what these are weighted with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .decays import Decays, Gates, Gradients, Led, OfLed, OfProducts, decays, dots, sums_of

if TYPE_CHECKING:
    from .chunk import Chunks


def products(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor, Led]:
    """Compute ``Γᵢⱼ = exp(sumᵢ - sumⱼ)`` for j ≤ i, ``kᵢ·kⱼ Γᵢⱼ`` for j < i and ``qᵢ·kⱼ Γᵢⱼ``, and eQ behind them."""
    between, turned = _between(chunks.gates), chunks.key.transpose(-1, -2)
    of_keys = _weighted(torch.bmm(chunks.key, turned), between, chunks.shared).tril_(-1)
    of_queries = _weighted(torch.bmm(chunks.query, turned), between, chunks.shared)
    edges = decays(chunks.gates)
    return between, of_keys, of_queries, _weighted(chunks.query, edges.lead, chunks.shared), led(chunks, edges)


def led(chunks: Chunks, decays: Decays) -> Led:
    """Give keys the decays to the bounds of their chunk."""
    lead, trail, whole = decays
    return Led(chunks.key, lead, _weighted(chunks.key, trail * chunks.beta, chunks.shared), whole)


def gradients_of_gates(
    chunks: Chunks, decays: Decays, of_products: OfProducts, between: Tensor, of_led: OfLed
) -> Gradients:
    """Compute the gradients of queries, keys and sums of gates.

    Args:
        chunks: the tokens.
        decays: of them.
        of_products: the gradients of products; they are written over.
        between: Γ.
        of_led: those of keys and queries with their decays, likewise.
    """
    query, key, beta, shared, (lead, trail, _) = chunks.query, chunks.key, chunks.beta, chunks.shared, decays
    carried = lead * (dots(of_led.query, query, shared) - dots(of_led.key, key, shared))
    kept = trail * dots(of_led.trailed, key, shared)
    sums = torch.bmm(of_products.pairs, beta) - beta * of_products.given + carried

    between = between * beta.transpose(-1, -2)
    grad_keys, grad_queries = (_summed(grad.mul_(between), shared) for grad in (of_products.keys, of_products.queries))
    grad_keys.tril_(-1)
    grad_query = _summed(of_led.query.mul_(lead), shared).add_(torch.bmm(grad_queries, key))
    grad_key = of_led.trailed.mul_(trail * beta).addcmul_(of_led.key, lead, value=-1)
    grad_key = _summed(grad_key, shared).add_(torch.bmm(grad_queries.transpose(-1, -2), query))
    grad_key.sub_(torch.bmm(grad_keys + grad_keys.transpose(-1, -2), key))
    return Gradients(grad_query, grad_key, sums, kept, kept * beta)


def _weighted(x: Tensor, weights: Tensor, shared: int) -> Tensor:
    """Multiply what heads share, ``[M / shared, C, D]``, with what each has by itself, ``[M, C, 1 or D]``."""
    return (x.unsqueeze(1) * weights.unflatten(0, (-1, shared))).flatten(0, 1)


def _summed(x: Tensor, shared: int) -> Tensor:
    """Add up ``[M, C, D]`` over the heads that share a key, ``[M / shared, C, D]``."""
    return x if shared == 1 else x.unflatten(0, (-1, shared)).sum(1)


def _between(gates: Gates) -> Tensor:
    """Compute Γ, zero above the diagonal and over the bounds of sequences."""
    sums, bounds = sums_of(gates), gates.bounds
    exponents = sums - sums.transpose(-1, -2)
    if bounds is None:
        later = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=sums.device).triu(1)
        return exponents.masked_fill_(later, float("-inf")).exp_()
    by_row = exponents.unflatten(0, (*bounds.same.shape[:2], -1))
    return by_row.masked_fill_(~bounds.same.unsqueeze(2), float("-inf")).exp_().flatten(0, 2)
