"""Products of keys and queries within chunks where a head has one gate a token: the gated delta rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .gates import Decays, Gates, Led, decays, dots, sums_of

if TYPE_CHECKING:
    from .segment import Chunks


def products(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Led]:
    """Compute ``Γᵢⱼ = exp(sumᵢ - sumⱼ)`` for j ≤ i, ``kᵢ·kⱼ Γᵢⱼ`` for j < i and ``qᵢ·kⱼ Γᵢⱼ``: ``[M, C, C]`` each."""
    between, turned = _between(chunks.gates), chunks.key.transpose(-1, -2)
    of_keys = torch.bmm(chunks.key, turned) * between
    of_keys.diagonal(dim1=-2, dim2=-1).zero_()
    return between, of_keys, torch.bmm(chunks.query, turned) * between, led(chunks, decays(chunks.gates))


def led(chunks: Chunks, decays: Decays) -> Led:
    """Give keys and queries the decays to the bounds of their chunk."""
    lead, trail, whole = decays
    return Led(chunks.query * lead, chunks.key, lead, chunks.key * (trail * chunks.beta), whole)


def product_gradients(
    chunks: Chunks, between: Tensor, grad_keys: Tensor, grad_queries: Tensor
) -> tuple[Tensor, Tensor, None]:
    """Compute the gradients of :func:`products` times βⱼ for query and key; that of the sums follows from the pairs.

    Args:
        chunks: the tokens.
        between: Γ.
        grad_keys: that of the product of keys, the sign changed; only what is below the diagonal counts.
        grad_queries: of the other product.
    """
    query, key = chunks.query, chunks.key
    between = between * chunks.beta.transpose(-1, -2)
    grad_keys, grad_queries = grad_keys * between, grad_queries * between
    grad_keys.diagonal(dim1=-2, dim2=-1).zero_()
    grad_key = torch.bmm(grad_queries.transpose(-1, -2), query)
    grad_key = torch.baddbmm(grad_key, grad_keys + grad_keys.transpose(-1, -2), key, alpha=-1)
    return torch.bmm(grad_queries, key), grad_key, None


def decay_gradients(
    chunks: Chunks, decays: Decays, grads: tuple[Tensor, Tensor, Tensor], of_states: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Add to gradients what comes from the state before a chunk, and from that behind it.

    Args:
        chunks: the tokens.
        decays: of them.
        grads: the gradients of query, key and sums of gates so far.
        of_states: the gradients of eQ, of -eK and of βlK, ``[M, C, D]``.

    Returns:
        The gradients of query, key and sums, without that of the sums behind tokens; that one divided by -β,
        ``[M, C, 1]``.
    """
    query, key, (lead, trail, _) = chunks.query, chunks.key, decays
    of_query, of_key, of_trailed = of_states
    carried = dots(of_query, query) - dots(of_key, key)
    grad_key = torch.addcmul(torch.addcmul(grads[1], of_key, lead, value=-1), of_trailed, trail * chunks.beta)
    grad_query, grad_sums = torch.addcmul(grads[0], of_query, lead), torch.addcmul(grads[2], carried, lead)
    return grad_query, grad_key, grad_sums, trail * dots(of_trailed, key)


def _between(gates: Gates) -> Tensor:
    """Compute Γ, zero above the diagonal and over the bounds of sequences."""
    sums, bounds = sums_of(gates), gates.bounds
    exponents = sums - sums.transpose(-1, -2)
    if bounds is None:
        later = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=sums.device).triu(1)
        return exponents.masked_fill(later, float("-inf")).exp()
    by_row = exponents.unflatten(0, (*bounds.same.shape[:2], -1))
    return by_row.masked_fill(~bounds.same.unsqueeze(2), float("-inf")).exp().flatten(0, 2)
