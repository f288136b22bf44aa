"""What the operators for attention take, and how tensors are filled up to it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.autocast import autocast_dtype
from .._common.cann import CANN
from .._common.distributed import is_distributed
from .._common.functorch import is_transformed
from ..attention_spec import Band, Options, Sequences
from .fusion_attention import takes_sinks

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD, _MOST_HEADS, _MOST_BATCHES = 768, 256, 2**21
_LARGEST_PACKED_GRADIENT = 768 if CANN >= (8, 5) else 512  # of heads
LATENT, ROTATED = 512, 64  # sizes of the one key head of latents, the only ones of any operator
LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)  # of its queries
_INDEXED = 128  # the size of an indexer's heads
_CHOSEN = (*range(1, 2049), *range(3072, 8193, 1024))  # how many keys an indexer chooses
MOST_ROWS_COPIED = 10239  # of a batch: npu_moe_init_routing_v2 takes one expert more, op-plugin's page of that name
LONGEST = 2**20  # tokens of a sequence, or of all that are packed
MOST_SEQUENCES = 1024  # in one launch


def is_fused(query: Tensor, key: Tensor, value: Tensor, options: Options) -> bool:
    """Tell whether the operators take tensors, ``[B, N, S, D]`` or ``[T, N, D]``.

    Their limits (Atlas A2 and A3): op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention_v3.md.
    """
    heads, key_heads = query.shape[1], key.shape[1]
    return (
        query.device.type == "npu"
        and query.dtype in _FUSED_DTYPES
        and query.dtype == key.dtype == value.dtype
        and not is_distributed(query, key, value)
        and query.numel() > 0
        and key.numel() > 0
        and value.numel() > 0
        and query.shape[-1] <= _LARGEST_HEAD
        and value.shape[-1] <= _LARGEST_HEAD
        and heads <= _MOST_HEADS
        and heads % key_heads == 0
        and query.shape[0] <= _MOST_BATCHES
        and not (options.needs_torch() or is_transformed())
        and (options.sink is None or takes_sinks())
        and options.dropout < 1
    )


def is_fused_packed(sequences: Sequences, band: Band) -> bool:
    """Tell whether the operators take sequences: in this layout no query may be without a key."""
    return max(sequences.ends[-1], sequences.key_ends[-1]) <= LONGEST and not any(
        queries and band.leaves_rows_empty(queries, keys) for queries, keys in sequences.lengths()
    )


def is_fused_choice(query: Tensor, key: Tensor, count: int) -> bool:
    """Tell whether ``npu_lightning_indexer`` chooses so many keys, of ``[B, S_q, H, D]`` among ``[B, S_k, D]``.

    It takes weights in float32 since CANN 9.0: op-plugin 7.3.0, docs/context/torch_npu-npu_lightning_indexer.md; and,
    with its other limits (Atlas A2 and A3), 26.0.0, docs/zh/custom_APIs/torch_npu/torch_npu-npu_lightning_indexer.md.
    """
    return (
        CANN >= (9, 0)
        and query.device.type == "npu"
        and query.dtype == key.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] == _INDEXED
        and query.shape[2] <= 64
        and count in _CHOSEN
        and query.numel() > 0
        and not is_distributed(query, key)
        and hasattr(torch.ops.npu, "npu_lightning_indexer")
    )


def reads_chosen_in_place(query: Tensor, latents: Tensor, rope: Tensor) -> bool:
    """Tell whether ``npu_sparse_flash_attention`` takes ``[B, S_q, N, D]``, and the two parts of one key head.

    Its limits (Atlas A2 and A3), since CANN 8.5: op-plugin,
    docs/zh/custom_APIs/torch_npu/torch_npu-npu_sparse_flash_attention.md. It takes no sinks there.
    """
    return (
        CANN >= (8, 5)
        and query.device.type == "npu"
        and query.dtype == latents.dtype == rope.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and (latents.shape[2], rope.shape[2]) == (LATENT, ROTATED)
        and query.shape[2] in LATENT_HEADS
        and query.numel() > 0
        and not is_distributed(query, latents, rope)
        and hasattr(torch.ops.npu, "npu_sparse_flash_attention")
    )


def needs_gradient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether a gradient of one of the tensors is to be computed."""
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def fits_packed_gradient(query: Tensor, key: Tensor, value: Tensor, band: Band | None) -> bool:
    """Tell whether the gradient of packed sequences is not needed, or an operator computes it too.

    It takes no window of a single key: CANN's ops-transformer, flash_attention_score_grad/op_host,
    flash_attention_score_grad_tiling_s1s2_bn2gs1s2.cpp, ``s1Token + s2Token <= 0`` of TND and BAND. Before CANN 8.5 it
    takes smaller heads: docs/aclnnFlashAttentionUnpaddingScoreGrad.md there, of November 2025.

    Args:
        query: ``[T, N, D]``.
        key: ``[T_k, N_k, D]``.
        value: ``[T_k, N_k, D_v]``.
        band: which keys of its sequence a query sees; None where a mask says so.
    """
    if not needs_gradient(query, key, value):
        return True
    single = band is not None and band.left == band.right == 0
    return not single and max(query.shape[-1], value.shape[-1]) <= _LARGEST_PACKED_GRADIENT


def of_one_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast under autocast as torch does before a product."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def padded(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Fill heads up with zeros, which change no score.

    The value has to have heads that are not larger than those of the key, and heads in float32 are of whole 16 bytes,
    as torch_npu's scaled_dot_product_attention has them: op-plugin, ScaledDotProductAttentionKernelNpuOpApi.cpp.
    """
    unit = 4 if query.dtype == torch.float32 else 1
    value_size = -(-value.shape[-1] // unit) * unit
    size = max(-(-query.shape[-1] // unit) * unit, value_size)
    return _filled(query, size), _filled(key, size), _filled(value, value_size)


def _filled(tensor: Tensor, size: int) -> Tensor:
    missing = size - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor
