"""Products of keys and queries within chunks where a head has one decay a token: Gated DeltaNet.

Heads that share a query and a key share their products too; these are then multiplied with the decays of each head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .decays import (
    ChunkGradients,
    DecayedGradients,
    DecayedKeys,
    Decays,
    LogDecays,
    ProductGradients,
    chunk_decays,
    chunk_local_cumsum,
    row_dots,
)
from .tokens import Chunks


def intra_products(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor, DecayedKeys]:
    """Compute what a chunk needs of keys, queries and decays.

    Returns:
        Γ, ``Γᵢⱼ = exp(sumᵢ - sumⱼ)`` for j ≤ i; ``kᵢ·kⱼ Γᵢⱼ`` for j < i; ``qᵢ·kⱼ Γᵢⱼ``, all ``[M, C, C]``; queries with
        the decays from the start of their chunk, ``[M, C, K]``; and the keys with theirs.
    """
    pairwise_decay, key_t = _pairwise_decay(chunks.log_decays), chunks.key.transpose(-1, -2)
    kk = _scale_heads(torch.bmm(chunks.key, key_t), pairwise_decay, chunks.heads_per_key).tril_(-1)
    qk = _scale_heads(torch.bmm(chunks.query, key_t), pairwise_decay, chunks.heads_per_key)
    decays = chunk_decays(chunks.log_decays)
    q_cumdecay = _scale_heads(chunks.query, decays.from_start, chunks.heads_per_key)
    return pairwise_decay, kk, qk, q_cumdecay, decay_keys(chunks, decays)


def decay_keys(chunks: Chunks, decays: Decays) -> DecayedKeys:
    """Give keys the decays to the start and the end of their chunk."""
    from_start, to_end, chunk_decay = decays
    k_beta_to_end = _scale_heads(chunks.key, to_end * chunks.beta, chunks.heads_per_key)
    return DecayedKeys(chunks.key, from_start, k_beta_to_end, chunk_decay)


def intra_gradients(
    chunks: Chunks, decays: Decays, products: ProductGradients, pairwise_decay: Tensor, decayed: DecayedGradients
) -> ChunkGradients:
    """Compute the gradients of queries, keys and sums of g.

    Args:
        chunks: the tokens.
        decays: their decays.
        products: the gradients of products; they are written over.
        pairwise_decay: Γ.
        decayed: the gradients of queries and keys with their decays; they are written over.
    """
    query, key, beta, heads_per_key = chunks.query, chunks.key, chunks.beta, chunks.heads_per_key
    from_start, to_end, _ = decays
    d_from_start = row_dots(decayed.query, query, heads_per_key) - row_dots(decayed.neg_key, key, heads_per_key)
    d_beta = to_end * row_dots(decayed.k_beta_to_end, key, heads_per_key)
    d_cumsum = torch.bmm(products.log_decay, beta) - beta * products.column_sums + from_start * d_from_start

    decay_beta = pairwise_decay * beta.transpose(-1, -2)
    d_neg_kk, d_qk = (_sum_heads(grad.mul_(decay_beta), heads_per_key) for grad in (products.neg_kk, products.qk))
    d_neg_kk.tril_(-1)
    d_query = _sum_heads(decayed.query.mul_(from_start), heads_per_key).add_(torch.bmm(d_qk, key))
    d_key = decayed.k_beta_to_end.mul_(to_end * beta).addcmul_(decayed.neg_key, from_start, value=-1)
    d_key = _sum_heads(d_key, heads_per_key).add_(torch.bmm(d_qk.transpose(-1, -2), query))
    d_key.sub_(torch.bmm(d_neg_kk + d_neg_kk.transpose(-1, -2), key))
    return ChunkGradients(d_query, d_key, d_cumsum, d_beta, d_beta * beta)


def _scale_heads(x: Tensor, factors: Tensor, heads_per_key: int) -> Tensor:
    """Multiply what heads share, ``[M / heads_per_key, C, D]``, with the factors of each, ``[M, C, 1 or D]``."""
    return (x.unsqueeze(1) * factors.unflatten(0, (-1, heads_per_key))).flatten(0, 1)


def _sum_heads(x: Tensor, heads_per_key: int) -> Tensor:
    """Sum ``[M, C, D]`` over the heads that share a key, ``[M / heads_per_key, C, D]``."""
    return x if heads_per_key == 1 else x.unflatten(0, (-1, heads_per_key)).sum(1)


def _pairwise_decay(log_decays: LogDecays) -> Tensor:
    """Compute Γ, zero above the diagonal and between sequences."""
    sums, masks = chunk_local_cumsum(log_decays), log_decays.masks
    exponents = sums - sums.transpose(-1, -2)
    if masks is None:
        later = torch.ones(sums.shape[1], sums.shape[1], dtype=torch.bool, device=sums.device).triu(1)
        return exponents.masked_fill_(later, float("-inf")).exp_()
    same = masks.same_sequence
    by_row = exponents.unflatten(0, (*same.shape[:2], -1))
    return by_row.masked_fill_(~same.unsqueeze(2), float("-inf")).exp_().flatten(0, 2)
