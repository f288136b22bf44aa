"""The arguments of a delta rule, the way of its tokens into chunks, and that of their gradients back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.chunk_layout import from_chunks, num_chunks, to_chunks
from ..utils.l2norm import l2norm_factor, l2norm_gradient
from ..utils.packed_sequences import SequenceMasks
from .decays import LogDecays, g_gradient


class Tokens(NamedTuple):
    """Holds the arguments of a delta rule that have a value for each token.

    Query and key are ``[B, T, G, K]``, value ``[B, T, H, V]``, g ``[B, T, H, 1 or K]`` and beta ``[B, T, H]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


class DeltaRuleOptions(NamedTuple):
    """Holds the scale of the queries, and whether queries and keys are divided by their L2 norm."""

    scale: float
    use_qk_l2norm: bool


class NormFactors(NamedTuple):
    """Holds what queries and keys are multiplied with on their way into chunks, ``[B, T, G, 1]`` in float32."""

    query: Tensor
    key: Tensor


@dataclass
class Chunks:
    """Holds tokens without their values in chunks, in float32.

    Attributes:
        query, key: normalised and scaled, ``[M / heads_per_key, C, K]``; M counts chunks, rows and heads.
        beta: ``[M, C, 1]``.
        log_decays: g, of one channel or of K.
        number: how many chunks a row has.
        rows: rows times heads.
        heads_per_key: how many heads share one query and key here. Where each channel has a decay it is one: there each
            head has copies.
    """

    query: Tensor
    key: Tensor
    beta: Tensor
    log_decays: LogDecays
    number: int
    rows: int
    heads_per_key: int


def norm_factors(tokens: Tokens, options: DeltaRuleOptions) -> NormFactors:
    """Compute what queries and keys are multiplied with: the scale, and the inverse of the L2 norm."""
    if options.use_qk_l2norm:
        return NormFactors(l2norm_factor(tokens.query, options.scale), l2norm_factor(tokens.key, 1.0))
    shape, device = (*tokens.key.shape[:3], 1), tokens.key.device
    return NormFactors(
        *(torch.full(shape, scale, dtype=torch.float32, device=device) for scale in (options.scale, 1.0))
    )


def chunk_tokens(tokens: Tokens, factors: NormFactors, masks: SequenceMasks | None) -> Chunks:
    """Bring all but the values of tokens into chunks."""
    heads = tokens.value.shape[2]
    groups = heads // tokens.key.shape[2]
    copies = groups if tokens.g.shape[-1] > 1 else 1
    query, key = to_chunks(tokens.query, copies, factors.query), to_chunks(tokens.key, copies, factors.key)
    log_decays, beta = LogDecays(to_chunks(tokens.g), masks), to_chunks(tokens.beta.unsqueeze(-1))
    rows, length = tokens.value.shape[:2]
    return Chunks(query, key, beta, log_decays, num_chunks(length), heads * rows, groups // copies)


def token_gradients(
    chunks: Chunks,
    tokens: Tokens,
    options: DeltaRuleOptions,
    factors: NormFactors,
    grads: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Bring the gradients of chunks into the shapes and dtypes of the tokens.

    Args:
        chunks: the tokens in chunks.
        tokens: the tokens, of which the values may be any tensor of their shape.
        options: scale and norm.
        factors: what queries and keys were multiplied with.
        grads: the gradients of query, key, value and beta in chunks, and the two that :func:`g_gradient` takes.
        dtype: that of the values.
    """
    query, key, value, beta, to_end, cumsum = grads
    batch, length, heads = tokens.value.shape[:3]
    copies = heads // tokens.key.shape[2] // chunks.heads_per_key
    if options.use_qk_l2norm:
        query, key = l2norm_gradient(query, chunks.query, options.scale), l2norm_gradient(key, chunks.key, 1.0)
    return (
        from_chunks(query, batch, length, tokens.query.dtype, copies, factors.query),
        from_chunks(key, batch, length, tokens.key.dtype, copies, factors.key),
        from_chunks(value, batch, length, dtype),
        g_gradient(to_end, cumsum, chunks.log_decays.masks, batch, length).to(tokens.g.dtype),
        from_chunks(beta, batch, length, tokens.beta.dtype).squeeze(-1),
    )
