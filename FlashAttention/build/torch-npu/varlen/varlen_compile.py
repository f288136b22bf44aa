"""Attention of packed sequences in a graph of torch.compile: their lengths are not known until it runs."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_spec import Band, Options
from ..ops.fusion_attention import sparsity_of, takes_tensors
from ..ops.fusion_attention_autograd import launch_differentiable
from ..ops.limits import LONGEST, MOST_SEQUENCES, fits_packed_gradient, is_fused, padded
from .cu_seqlens import ends_of, require_within


# What an operator returns, a graph takes as a tensor; what it does, such as remembering lengths, no graph sees.
@torch.library.custom_op(f"{__name__.partition('.')[0]}::ends_of", mutates_args=())
def _ends_operator(cumulative: Tensor, tokens: int) -> Tensor:
    """Return where sequences end, int64 on the CPU; the last one is what lies behind those that are said."""
    ends = ends_of(cumulative)
    require_within("flash_attention", "lengths", ends, tokens)
    return torch.tensor([*ends, tokens], dtype=torch.int64, device="cpu")


@_ends_operator.register_fake
def _(cumulative: Tensor, tokens: int) -> Tensor:
    return torch.empty(cumulative.shape[0], dtype=torch.int64, device="cpu")


def stays_whole(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cumulative: Tensor,
    key_cumulative: Tensor,
    band: Band,
    options: Options,
) -> bool:
    """Tell whether a graph is compiled that :func:`attend_packed_in_graph` keeps whole.

    Keys have to be of the same lengths as queries, which is known where both are one tensor: then each query sees a
    key. Elsewhere lengths are read on the host, and the graph ends there.

    Args:
        query: ``[T, N, D]``.
        key: ``[T_k, N_k, D]``.
        value: ``[T_k, N_k, D_v]``.
        cumulative: ``[1 + sequences]``.
        key_cumulative: likewise, of the keys.
        band: which keys of its sequence a query sees.
        options: how scores become weights.
    """
    return (
        torch.compiler.is_compiling()
        and cumulative is key_cumulative
        and cumulative.dim() == 1
        and not cumulative.is_floating_point()
        and not options.deterministic
        and query.shape[0] == key.shape[0] <= LONGEST
        and cumulative.shape[0] <= MOST_SEQUENCES
        and is_fused(query, key, value, options)
        and fits_packed_gradient(query, key, value, band)
        and takes_tensors()
    )


def attend_packed_in_graph(
    query: Tensor, key: Tensor, value: Tensor, cumulative: Tensor, band: Band, options: Options
) -> Tensor:
    """Compute attention within each sequence, as ``attend_packed`` does, in one launch.

    The host reads lengths when the graph runs, once for all layers.

    Args:
        query: ``[T, N, D]``.
        key: ``[T, N_k, D]``.
        value: ``[T, N_k, D_v]``.
        cumulative: ``[1 + sequences]``, integers that begin with zero.
        band: which keys of its sequence a query sees, its own among them.
        options: how scores become weights.

    Returns:
        ``[T, N, D_v]``; zero behind the last sequence.

    Raises:
        ValueError: lengths do not ascend, or pass the tokens; when the graph runs.
    """
    tokens, size = query.shape[0], value.shape[2]
    ends = _ends_operator(cumulative, tokens)
    sparsity = sparsity_of(band, tokens, tokens, query)
    result = launch_differentiable(*padded(query, key, value), "TND", sparsity, options, ends, ends)[..., :size]
    behind = torch.arange(tokens, device=query.device) >= cumulative[-1]
    return result.masked_fill(behind[:, None, None], 0.0)
