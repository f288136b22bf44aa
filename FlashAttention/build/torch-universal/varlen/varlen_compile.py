"""Attention of packed sequences under torch.compile, whose lengths are not known until the graph runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_spec import AttentionSpec, Band
from ..ops.fusion_attention import takes_tensor_lengths, to_operator_mask
from ..ops.fusion_attention_autograd import launch_differentiable
from ..ops.limits import MOST_SEQUENCES, MOST_TOKENS, fits_varlen_gradient, is_fused, pad_heads
from .cu_seqlens import require_ends_within, sequence_ends


# An operator of our own: the graph takes what it returns as a tensor, and does not trace how it reads and remembers.
@torch.library.custom_op(f"{__name__.partition('.')[0]}::sequence_ends", mutates_args=())
def _sequence_ends_operator(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Return where sequences end, int64 on the CPU; one more holds the tokens behind those of ``cu_seqlens``."""
    ends = sequence_ends(cu_seqlens)
    require_ends_within("flash_attention", "lengths", ends, tokens)
    return torch.tensor([*ends, tokens], dtype=torch.int64, device="cpu")


@_sequence_ends_operator.register_fake
def _(cu_seqlens: Tensor, tokens: int) -> Tensor:
    return torch.empty(cu_seqlens.shape[0], dtype=torch.int64, device="cpu")


def is_compiled_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    band: Band,
    spec: AttentionSpec,
) -> bool:
    """Tell whether a graph is compiled, and :func:`attend_varlen_compiled` computes attention without a graph break.

    The lengths of keys have to be those of queries, so that each query sees a key, which is known where both are one
    tensor. Otherwise the host reads lengths, and the graph breaks there.

    Args:
        query: ``[T, N, D]``.
        key: ``[T_k, N_k, D]``.
        value: ``[T_k, N_k, D_v]``.
        cu_seqlens_q: ``[1 + sequences]``.
        cu_seqlens_k: likewise, of the keys.
        band: which keys of its sequence a query sees.
        spec: how scores become weights.
    """
    return (
        torch.compiler.is_compiling()
        and cu_seqlens_q is cu_seqlens_k
        and cu_seqlens_q.dim() == 1
        and not cu_seqlens_q.is_floating_point()
        and not spec.deterministic
        and query.shape[0] == key.shape[0] <= MOST_TOKENS
        and cu_seqlens_q.shape[0] <= MOST_SEQUENCES
        and is_fused(query, key, value, spec)
        and fits_varlen_gradient(query, key, value, band)
        and takes_tensor_lengths()
    )


def attend_varlen_compiled(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, band: Band, spec: AttentionSpec
) -> Tensor:
    """Compute attention within each of several packed sequences, as ``attend_varlen`` does, in one launch.

    The host reads lengths when the graph runs, once for all layers.

    Args:
        query: ``[T, N, D]``.
        key: ``[T, N_k, D]``.
        value: ``[T, N_k, D_v]``.
        cu_seqlens: ``[1 + sequences]``, integers that begin with zero.
        band: which keys of its sequence a query sees, its own among them.
        spec: how scores become weights.

    Returns:
        ``[T, N, D_v]``; zero behind the last sequence.

    Raises:
        ValueError: when the graph runs, if lengths do not ascend or exceed the tokens.
    """
    tokens, size = query.shape[0], value.shape[2]
    ends = _sequence_ends_operator(cu_seqlens, tokens)
    operator_mask = to_operator_mask(band, tokens, tokens, query)
    result = launch_differentiable(*pad_heads(query, key, value), "TND", operator_mask, spec, ends, ends)[..., :size]
    behind = torch.arange(tokens, device=query.device) >= cu_seqlens[-1]
    return result.masked_fill(behind[:, None, None], 0.0)
