"""The delta rule over the chunks of a segment: products within all chunks at once, and the states between them.

With k, q, v of a chunk as rows, Γ the decays between its tokens (:mod:`.gdn_intra`, :mod:`.kda_intra`), e, l and w the
decays from its start to a token, from a token to its end and over all of it, and S the state before the chunk:

    A = (KKᵀ⊙Γ) β below the diagonal    ut_inverse = (I + A)⁻¹    intra_chunk_attn = (QKᵀ⊙Γ) β
    new_values = ut_inverse V           k_cumdecay = ut_inverse (eK)
    v_new = new_values - k_cumdecay S
    O  = eQ S + intra_chunk_attn v_new = (eQ - intra_chunk_attn k_cumdecay) S + intra_chunk_attn new_values
    S⁺ = w S + (βlK)ᵀ v_new            = (βlK)ᵀ new_values - ((βlK)ᵀ k_cumdecay - w) S

"Gated Delta Networks" (arXiv 2412.06464) and "Kimi Linear" (arXiv 2510.26692), with the names of transformers'
torch_chunk_gated_delta_rule. Two things differ. v_new is eliminated, so that a chunk costs the recurrence one product.
And β is a factor of keys in place of values, where these are added: the gradient of β then needs no products but those
that the gradient of Γ needs. So transformers' new_values, k_cumdecay and v_new are β times those here, and its
intra_chunk_attn has no β.

What is added to a product is added in place behind it: ``baddbmm`` in float32 copies it first, and writes the product
into a workspace, with beta = 1 too (CANN's ops-nn, matmul/batch_mat_mul_v3/op_host/op_api/aclnn_baddbmm.cpp).
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .._common.derivatives import is_transformed
from ..utils.solve_tril import solve_tril
from . import gdn_intra, kda_intra
from .decays import DecayedGradients, DecayedKeys, Decays, ProductGradients, chunk_decays, row_dots
from .tokens import Chunks


class IntraChunk(NamedTuple):
    """Holds the products within chunks that no state is needed for, ``[M, C, C]`` each.

    Attributes:
        pairwise_decay: Γ; empty where each channel has a decay, since Γ is no matrix there.
        kk: ``KKᵀ⊙Γ`` below the diagonal.
        qk: ``QKᵀ⊙Γ``.
        ut_inverse: ``(I + A)⁻¹``.
    """

    pairwise_decay: Tensor
    kk: Tensor
    qk: Tensor
    ut_inverse: Tensor


class SavedOutputs(NamedTuple):
    """Holds what a forward computes from states and a backward reads again.

    Attributes:
        state_query: what is multiplied with the state before the chunk, ``eQ - intra_chunk_attn k_cumdecay``,
            ``[M, C, K]``.
        v_new: ``[M, C, V]``.
    """

    state_query: Tensor
    v_new: Tensor


class ChunkStates(NamedTuple):
    """Holds the states of a recurrence over chunks.

    Attributes:
        before: the state before each chunk, ``[N, M, K, V]``; backwards, the gradient of the state behind it.
        last: the state behind the last chunk, ``[M, K, V]``; backwards, the gradient of the state before the first.
    """

    before: Tensor
    last: Tensor


class _StateFactors(NamedTuple):
    """Holds what the results and the recurrence are computed from.

    Attributes:
        intra_chunk_attn: ``[M, C, C]``.
        k_cumdecay: ``[M, C, K]``.
        neg_transition: ``(βlK)ᵀ k_cumdecay - w``, which takes a state to what it loses over a chunk,
            ``[N, rows, K, K]``.
    """

    intra_chunk_attn: Tensor
    k_cumdecay: Tensor
    neg_transition: Tensor


def intra_chunk(chunks: Chunks) -> tuple[IntraChunk, Tensor, DecayedKeys]:
    """Compute the products within chunks, ``eQ``, ``[M, C, K]``, and the keys with their decays."""
    pairwise_decay, kk, qk, q_cumdecay, keys = _intra(chunks).intra_products(chunks)
    ut_inverse = solve_tril(kk * -chunks.beta.transpose(-1, -2))
    return IntraChunk(pairwise_decay, kk, qk, ut_inverse), q_cumdecay, keys


def forward(
    chunks: Chunks,
    intra: IntraChunk,
    q_cumdecay: Tensor,
    keys: DecayedKeys,
    value: Tensor,
    state: Tensor | None,
    needs_backward: bool,
) -> tuple[Tensor, ChunkStates, SavedOutputs | None]:
    """Compute the results of chunks, and the states around them.

    Args:
        chunks: the tokens.
        intra: the products within chunks.
        q_cumdecay: ``eQ``, ``[M, C, K]``; it is written over.
        keys: with their decays.
        value: of the tokens, ``[M, C, V]``.
        state: before the first chunk, ``[rows, K, V]``; None for zeros.
        needs_backward: whether a backward follows.

    Returns:
        ``[M, C, V]``, the states, and what the backward reads again, if one follows.
    """
    factors = _state_factors(chunks, intra, keys)
    new_values = torch.bmm(intra.ut_inverse, value)
    update = torch.bmm(keys.k_beta_to_end.transpose(-1, -2), new_values)
    states = scan_chunks(factors.neg_transition, update.unflatten(0, (chunks.number, chunks.rows)), state)
    state_query = q_cumdecay.sub_(torch.bmm(factors.intra_chunk_attn, factors.k_cumdecay))
    before = states.before.flatten(0, 1)
    out = torch.bmm(factors.intra_chunk_attn, new_values).add_(torch.bmm(state_query, before))
    if not needs_backward:
        return out, states, None
    v_new = new_values.sub_(torch.bmm(factors.k_cumdecay, before))
    return out, states, SavedOutputs(state_query, v_new)


def last_state(chunks: Chunks, value: Tensor, state: Tensor) -> Tensor:
    """Compute the state behind rows of one chunk each, from that before them, ``[rows, K, V]``."""
    return forward(chunks, *intra_chunk(chunks), value, state, needs_backward=False)[1].last


def backward(
    chunks: Chunks, intra: IntraChunk, saved: SavedOutputs, states: Tensor, grad: Tensor, grad_state: Tensor | None
) -> tuple[Tensor, ...]:
    """Compute the gradients of the tokens in chunks, and of the state before them.

    The gradient of a decay between two tokens is made of what passes through that decay alone. A token's part in its
    own result is left out, though it would cancel: next to it, the gradient of decays that are nearly zero would lose
    its digits.

    Args:
        chunks: the tokens.
        intra: the products within chunks.
        saved: what the forward kept.
        states: before each chunk, ``[N, rows, K, V]``.
        grad: the gradient of the results, ``[M, C, V]``.
        grad_state: that of the last state, ``[rows, K, V]``; None for zeros.

    Returns:
        The gradients of query, key, value and beta, the two that :func:`.decays.g_gradient` takes, and that of the
        first state.
    """
    decays = chunk_decays(chunks.log_decays)
    d_value, decayed, d_chunk_decay, d_state = _state_gradients(chunks, intra, saved, states, grad, grad_state, decays)
    v_new_t = saved.v_new.transpose(-1, -2)
    d_neg_kk, d_qk = torch.bmm(d_value, v_new_t), torch.bmm(grad, v_new_t)  # without their factor β
    d_log_decay = d_qk * intra.qk
    on_diagonal = d_log_decay.diagonal(dim1=-2, dim2=-1).unsqueeze(-1).clone()
    d_log_decay.addcmul_(d_neg_kk, intra.kk, value=-1).tril_(-1)
    column_sums = d_log_decay.sum(-2).unsqueeze(-1)
    products = ProductGradients(d_neg_kk, d_qk, d_log_decay, column_sums)
    found = _intra(chunks).intra_gradients(chunks, decays, products, intra.pairwise_decay, decayed)
    found.cumsum[:, -1:] += d_chunk_decay
    d_beta = column_sums + on_diagonal + found.beta
    return found.query, found.key, d_value, d_beta, found.to_end, found.cumsum, d_state


def _intra(chunks: Chunks) -> ModuleType:
    """Return the module that computes products within chunks: for one decay a head, or one a channel."""
    return gdn_intra if chunks.log_decays.g.shape[-1] == 1 else kda_intra


def _state_factors(chunks: Chunks, intra: IntraChunk, keys: DecayedKeys) -> _StateFactors:
    intra_chunk_attn = intra.qk * chunks.beta.transpose(-1, -2)
    k_cumdecay = keys.k_cumdecay(intra.ut_inverse, chunks.heads_per_key)
    neg_transition = torch.bmm(keys.k_beta_to_end.transpose(-1, -2), k_cumdecay)
    eye = torch.eye(neg_transition.shape[-1], dtype=neg_transition.dtype, device=neg_transition.device)
    # a whole matrix, since only the AI CPU writes to a diagonal: solve_tril.py
    neg_transition.addcmul_(eye, keys.chunk_decay.unsqueeze(-1), value=-1)
    return _StateFactors(intra_chunk_attn, k_cumdecay, neg_transition.unflatten(0, (chunks.number, chunks.rows)))


def _state_gradients(
    chunks: Chunks,
    intra: IntraChunk,
    saved: SavedOutputs,
    states: Tensor,
    grad: Tensor,
    grad_state: Tensor | None,
    decays: Decays,
) -> tuple[Tensor, DecayedGradients, Tensor, Tensor]:
    """Compute the gradients of values, of what meets states, of decays over chunks, and of the first state.

    Its intermediate tensors are as large as all that the rest of the backward needs: a function of its own frees them
    before that.
    """
    keys = _intra(chunks).decay_keys(chunks, decays)
    factors = _state_factors(chunks, intra, keys)
    update = torch.bmm(saved.state_query.transpose(-1, -2), grad).unflatten(0, (chunks.number, chunks.rows))
    d_states = scan_chunks(factors.neg_transition.transpose(-1, -2), update, grad_state, backwards=True)
    before, d_behind = states.flatten(0, 1), d_states.before.flatten(0, 1)
    d_v_new = torch.bmm(factors.intra_chunk_attn.transpose(-1, -2), grad).add_(torch.bmm(keys.k_beta_to_end, d_behind))
    d_value = torch.bmm(intra.ut_inverse.transpose(-1, -2), d_v_new)
    before_t = before.transpose(-1, -2)
    decayed = DecayedGradients(
        torch.bmm(grad, before_t),
        torch.bmm(d_value, before_t),
        torch.bmm(saved.v_new, d_behind.transpose(-1, -2)),
    )
    d_chunk_decay = keys.chunk_decay.unsqueeze(1) * _state_dots(before, d_behind, keys.chunk_decay.shape[-1])
    return d_value, decayed, d_chunk_decay, d_states.last


def scan_chunks(neg_transition: Tensor, update: Tensor, first: Tensor | None, backwards: bool = False) -> ChunkStates:
    """Compute ``S ← Uₙ - Rₙ S`` for all chunks n, one after the other, or from the last to the first.

    Args:
        neg_transition: R, ``[N, M, K, K]``.
        update: U, ``[N, M, K, V]``.
        first: the state to start with, ``[M, K, V]`` in float32; None for zeros.
        backwards: from the last chunk to the first.
    """
    order = list(range(update.shape[0]))[:: -1 if backwards else 1]
    start = torch.zeros(update.shape[1:], dtype=update.dtype, device=update.device) if first is None else first
    if torch.compiler.is_compiling() or is_transformed() or torch.is_grad_enabled():
        states = [start]
        for n in order:
            states.append(torch.baddbmm(update[n], neg_transition[n], states[-1], alpha=-1))
        return ChunkStates(torch.stack(states[:-1][:: -1 if backwards else 1]), states[-1])
    before, last = torch.empty_like(update), torch.empty_like(start)
    before[order[0]].copy_(start)
    chunks = list(zip(update.unbind(), neg_transition.unbind(), before.unbind()))  # one call for all chunks
    for n, following in zip(order, [*order[1:], None]):
        added, factor, state = chunks[n]
        behind = last if following is None else chunks[following][2]
        torch.sub(added, torch.bmm(factor, state, out=behind), out=behind)
    return ChunkStates(before, last)


def _state_dots(states: Tensor, d_states: Tensor, channels: int) -> Tensor:
    """Compute the products of states and gradients, summed for each channel of a key or for all, ``[M, 1, G]``."""
    if channels > 1:
        return row_dots(states, d_states).transpose(-1, -2)
    return torch.bmm(states.flatten(1).unsqueeze(1), d_states.flatten(1).unsqueeze(2))
