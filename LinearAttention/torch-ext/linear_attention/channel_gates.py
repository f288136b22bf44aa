"""Products of keys and queries within chunks where every channel of a head has a gate: Kimi delta attention.

``Σ_d a_id b_jd exp(sum_id - sum_jd)`` is no matrix product, and all its terms take C times the memory of a and b. But
``exp(sumᵢ - sumₘ) exp(sumₘ - sumⱼ)`` for a token m between j and i is one, and neither factor exceeds one. A chunk is
halved, and its halves are, down to single tokens: the pairs of one token of a second half and one of the first half
before it have the last token of that between them. These are six products of whole chunks, of which each keeps its own
pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import CHUNK
from .sequences import Bounds

HALVINGS = CHUNK.bit_length() - 1


class _Halvings(NamedTuple):
    """Holds what is known of all halvings, L.

    Attributes:
        factors: of tokens, ``[M, L, C, K]``.
        pairs: 1 where a later token and an earlier one are parted by the halving, 0 elsewhere, ``[L, C, C]``, or
            ``[M, L, C, C]`` in packed rows.
        signs: 1 for tokens in second halves, -1 for the others, ``[L, C, 1]``.
    """

    factors: Tensor
    pairs: Tensor
    signs: Tensor


def products(query: Tensor, key: Tensor, sums: Tensor, bounds: Bounds | None) -> tuple[Tensor, Tensor]:
    """Compute ``Σ_d k_id k_jd Γ_ijd`` for j < i, and ``Σ_d q_id k_jd Γ_ijd`` for j ≤ i; both ``[M, C, C]``."""
    factors, pairs, _ = _halvings(sums, bounds)
    near = key.unsqueeze(1) * factors
    turned = near.transpose(-1, -2)
    eye = torch.eye(CHUNK, dtype=query.dtype, device=query.device)
    of_keys = (_product(near, turned) * pairs).sum(1)
    of_queries = (_product(query.unsqueeze(1) * factors, turned) * pairs).sum(1)
    return of_keys, torch.addcmul(of_queries, (query * key).sum(-1, keepdim=True), eye)


def product_gradients(
    query: Tensor,
    key: Tensor,
    sums: Tensor,
    bounds: Bounds | None,
    grad_keys: Tensor,
    grad_queries: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of :func:`products` for query, key and sums.

    A sum enters as that of the later token of a pair, or as that of the earlier one, so that its gradient is what the
    gradients of later tokens make with them, less what those of earlier ones do.

    Args:
        query: ``[M, C, K]``.
        key: ``[M, C, K]``.
        sums: ``[M, C, K]``.
        bounds: of packed sequences.
        grad_keys: of the first product, zero on and above the diagonal.
        grad_queries: of the second product.
    """
    factors, pairs, signs = _halvings(sums, bounds)
    near = key.unsqueeze(1) * factors
    far = grad_queries.unsqueeze(1) * pairs
    grad_query = (_product(far, near) * factors).sum(1)
    both = (grad_keys + grad_keys.transpose(-1, -2)).unsqueeze(1) * (pairs + pairs.transpose(-1, -2))
    grad = torch.baddbmm(
        _product(both, near).flatten(0, 1),
        far.transpose(-1, -2).flatten(0, 1),
        (query.unsqueeze(1) * factors).flatten(0, 1),
    )
    grad = grad.view_as(factors) * factors
    grad_sums = torch.addcmul(query * grad_query, key, (grad * signs).sum(1))
    alone = grad_queries.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # a token with itself, whose gate has no part in it
    return torch.addcmul(grad_query, key, alone), torch.addcmul(grad.sum(1), query, alone), grad_sums


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Multiply ``[M, L, P, Q]`` and ``[M, L, Q, R]``."""
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, left.shape[:2])


def _halvings(sums: Tensor, bounds: Bounds | None) -> _Halvings:
    places = torch.arange(CHUNK, device=sums.device)
    levels = torch.arange(HALVINGS, device=sums.device).unsqueeze(-1)
    later = (places >> levels) & 1  # whether a token is in a second half
    # the highest bit in which the places of two tokens differ is that of the halving that parts them
    parted = (places.unsqueeze(-1) ^ places) >> levels.unsqueeze(-1) == 1
    pairs = parted.tril(-1).to(sums.dtype)
    between = (places | ((1 << levels + 1) - 1)) - (1 << levels)  # the last token of the first half
    signs = (later * 2 - 1).unsqueeze(-1).to(sums.dtype)
    exponents = sums.unsqueeze(1) - sums.index_select(1, between.flatten()).unflatten(1, between.shape)
    exponents = exponents * signs
    if bounds is not None:
        exponents = exponents.clamp(max=0)  # of pairs over a bound, which are left out
        within = (bounds.same.unsqueeze(2) * pairs).unsqueeze(2)
        heads = sums.shape[0] // (within.shape[0] * within.shape[1])
        pairs = within.expand(-1, -1, heads, -1, -1, -1).flatten(0, 2)
    return _Halvings(exponents.exp(), pairs, signs)
