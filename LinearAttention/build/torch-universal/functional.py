"""Gated delta rules as functions of tensors, with the names and parameters of flash-linear-attention (fla)."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.arguments import check_tensors, empty_result, narrowed
from ._common.autocast import without_autocast
from .delta_rule.autograd import chunk_delta_rule
from .delta_rule.fused_recurrent import recurrent_step
from .delta_rule.packed_states import final_states
from .delta_rule.tokens import DeltaRuleOptions, Tokens
from .utils.packed_sequences import sequence_ids

Result = tuple[Tensor, Tensor | None]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Result:
    """Compute the gated delta rule in chunks: ``S⁺ = e^g S + k ⊗ β (v - kᵀ e^g S)``, ``o = scale · qᵀS⁺``.

    It is torch_chunk_gated_delta_rule of transformers, models/qwen3_next/modeling_qwen3_next.py, in matrix products of
    float32. Differentiable once: one node of autograd saves the arguments without the values, the states between chunks
    and the products within them. Under torch.func it is differentiable as often as torch's own operators are.

    Args:
        q: ``[B, T, H, K]``, of a floating dtype; of fewer heads than v where these divide them.
        k: likewise.
        v: ``[B, T, H, V]``.
        g: logarithms of decays, ``[B, T, H]``, at most 0.
        beta: ``[B, T, H]``.
        scale: of the queries; None for ``K ** -0.5``.
        initial_state: ``[B, H, K, V]``; None for zeros.
        output_final_state: whether the state behind the last token is returned.
        use_qk_l2norm_in_kernel: whether q and k are divided by ``sqrt(Σ x² + 1e-6)`` of each head first.
        cu_seqlens: where each sequence of the one row begins, and the last one ends, ``[S + 1]``. Their states start at
            zero; the final ones, ``[S, H, K, V]``, have no gradient.
        seq_idx: the number of the sequence of each token, ``[B, T]``, in place of ``cu_seqlens``. The final states are
            then those of the last sequence of each row.

    Returns:
        ``[B, T, H, V]`` in the dtype of q, and the state, ``[B, H, K, V]`` in float32, or None.

    Raises:
        ValueError: shapes or devices do not fit, or packed sequences come with an initial state.
        TypeError: an argument is not floating point, or numbers of sequences are not integers.
    """
    tokens = Tokens(q, k, v, g.unsqueeze(-1), beta)
    options = scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, seq_idx
    return _delta_rule(tokens, False, *options)


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Result:
    """Compute Kimi delta attention: :func:`chunk_gated_delta_rule` with a decay for every channel of a key.

    It is chunk_kimi_delta_attention of transformers, models/kimi_linear/modeling_kimi_linear.py.

    Args:
        g: logarithms of decays, ``[B, T, H, K]``, at most 0. All others are those of that function.
    """
    tokens = Tokens(q, k, v, g, beta)
    options = scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, seq_idx
    return _delta_rule(tokens, False, *options)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Result:
    """Compute :func:`chunk_gated_delta_rule`; one token is computed without chunks, as a step of decoding."""
    tokens = Tokens(q, k, v, g.unsqueeze(-1), beta)
    options = scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, seq_idx
    return _delta_rule(tokens, True, *options)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Result:
    """Compute :func:`chunk_kda`; one token is computed without chunks, as a step of decoding."""
    tokens = Tokens(q, k, v, g, beta)
    options = scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens, seq_idx
    return _delta_rule(tokens, True, *options)


def _delta_rule(
    tokens: Tokens,
    is_recurrent: bool,
    scale: float | None,
    state: Tensor | None,
    wants_state: bool,
    use_qk_l2norm: bool,
    cu_seqlens: Tensor | None,
    seq_idx: Tensor | None,
) -> Result:
    """Compute a delta rule in chunks; or, recurrently, one token of unpacked rows without them."""
    _check(tokens, state)
    tokens, state = Tokens(*map(narrowed, tokens)), narrowed(state)  # type: ignore[arg-type]
    batch, length = tokens.value.shape[:2]
    is_step = is_recurrent and length == 1 and cu_seqlens is None and seq_idx is None
    seq_idx = sequence_ids(batch, length, tokens.value.device, cu_seqlens, seq_idx)
    if seq_idx is not None and state is not None:
        raise ValueError("packed sequences start with a state of zeros: leave initial_state out, or pass them unpacked")
    options = DeltaRuleOptions(tokens.key.shape[-1] ** -0.5 if scale is None else scale, use_qk_l2norm)
    if not is_step and 0 in tokens.value.shape[:3]:
        out = empty_result(*tokens, shape=tokens.value.shape, dtype=tokens.query.dtype)
        return out, _empty_state(tokens, state, cu_seqlens) + out.float().sum() if wants_state else None
    with without_autocast(tokens.value):
        flat = None if state is None else state.float().flatten(0, 1)
        if is_step:
            out, last = recurrent_step(tokens, flat, options)
        else:
            wants_chunk_states = wants_state and cu_seqlens is not None
            out, last, chunk_states = chunk_delta_rule(tokens, flat, seq_idx, options, wants_chunk_states)
        if not wants_state:
            return out, None
        if cu_seqlens is None:
            return out, last.unflatten(0, (batch, tokens.value.shape[2]))
        return out, final_states(tokens, chunk_states, cu_seqlens, options)


def _empty_state(tokens: Tokens, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """Return the state behind no tokens: the initial one, or zeros for each row or packed sequence."""
    if state is not None:
        return state.float()
    batch, _, heads, size = tokens.value.shape
    sequences = batch if cu_seqlens is None else len(cu_seqlens) - 1
    shape = sequences, heads, tokens.key.shape[-1], size
    return torch.zeros(shape, dtype=torch.float32, device=tokens.value.device)


def _check(tokens: Tokens, state: Tensor | None) -> None:
    """Raise what the functions of this file document, for arguments that do not fit."""
    query, key, value, g, beta = tokens
    check_tensors(q=query, k=key, v=value, g=g, beta=beta, initial_state=state)
    shape = value.shape[:3]
    fits = (
        query.dim() == key.dim() == value.dim() == g.dim() == 4
        and query.shape == key.shape
        and key.shape[:2] == shape[:2]
        and key.shape[2] > 0
        and key.shape[3] > 0
        and shape[2] % key.shape[2] == 0
        and g.shape[:3] == beta.shape == shape
        and g.shape[3] in (1, key.shape[3])
    )
    if not fits:
        shapes = ", ".join(f"{n} {list(x.shape)}" for n, x in zip(("q", "k", "v", "g", "beta"), tokens))
        raise ValueError(
            f"q and k [B, T, G, K], v [B, T, H, V], g [B, T, H(, K)] and beta [B, T, H] have to fit: {shapes}"
        )
    expected = (shape[0], shape[2], key.shape[3], value.shape[3])
    if state is not None and state.shape != expected:
        raise ValueError(f"initial_state {list(state.shape)} must be [B, H, K, V], here {list(expected)}")
