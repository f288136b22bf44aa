"""Products of keys and queries within chunks where a head has one gate a token: the gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from .sequences import Bounds


def products(query: Tensor, key: Tensor, sums: Tensor, bounds: Bounds | None) -> tuple[Tensor, Tensor]:
    """Compute ``kᵢ·kⱼ Γᵢⱼ`` and ``qᵢ·kⱼ Γᵢⱼ`` for j ≤ i, with ``Γᵢⱼ = exp(sumᵢ - sumⱼ)``; both ``[M, C, C]``."""
    between = _between(sums, bounds)
    turned = key.transpose(-1, -2)
    return torch.bmm(key, turned) * between, torch.bmm(query, turned) * between


def product_gradients(
    query: Tensor,
    key: Tensor,
    sums: Tensor,
    bounds: Bounds | None,
    grad_keys: Tensor,
    grad_queries: Tensor,
) -> tuple[Tensor, Tensor, None]:
    """Compute the gradients of :func:`products` for query and key.

    That of the sums is left to the whole chunk. With ``S = exp(sum) S'`` the recurrence of S' knows the gates by
    ``exp(sum) q`` and ``exp(-sum) v`` alone: the gradient of a sum is that of q times q, less that of v times v.

    Args:
        query: ``[M, C, D]``.
        key: ``[M, C, D]``.
        sums: ``[M, C, 1]``.
        bounds: of packed sequences.
        grad_keys: of the first product, zero on and above the diagonal.
        grad_queries: of the second product.
    """
    between = _between(sums, bounds)
    grad_keys, grad_queries = grad_keys * between, grad_queries * between
    grad_query = torch.bmm(grad_queries, key)
    grad_key = torch.bmm(grad_keys + grad_keys.transpose(-1, -2), key)
    return grad_query, torch.baddbmm(grad_key, grad_queries.transpose(-1, -2), query), None


def _between(sums: Tensor, bounds: Bounds | None) -> Tensor:
    """Compute Γ, zero above the diagonal and over the bounds of sequences."""
    exponents = sums - sums.transpose(-1, -2)
    if bounds is None:
        later = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=sums.device).triu(1)
        return exponents.masked_fill(later, float("-inf")).exp()
    by_row = exponents.unflatten(0, (*bounds.same.shape[:2], -1))
    return by_row.masked_fill(~bounds.same.unsqueeze(2), float("-inf")).exp().flatten(0, 2)
