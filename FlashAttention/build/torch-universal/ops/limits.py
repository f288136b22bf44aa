"""Limits of the attention operators, and how tensors are cast and padded to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.autocast import autocast_dtype
from .._common.cann import CANN
from .._common.derivatives import is_transformed
from .._common.distributed import is_distributed
from ..attention_spec import AttentionSpec, Band, SequenceEnds
from .fusion_attention import takes_sinks

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_HEAD, _MOST_HEADS, _MOST_BATCHES = 768, 256, 2**21
_LARGEST_VARLEN_GRADIENT = 768 if CANN >= (8, 5) else 512  # head size
LATENT_SIZE, ROPE_SIZE = 512, 64  # MLA's kv_lora_rank and qk_rope_head_dim, the only ones that operators take
LATENT_HEADS = (1, 2, 4, 8, 16, 32, 64, 128)  # numbers of query heads over latents
_INDEXER_HEAD_SIZE = 128
_TOP_K = (*range(1, 2049), *range(3072, 8193, 1024))  # how many keys an indexer may choose
MOST_LOSS_QUERIES = 8192  # of npu_sparse_lightning_indexer_grad_kl_loss
MOST_COPIED_BATCHES = 10239  # npu_moe_init_routing_v2 takes one expert more: op-plugin's page of that name
MOST_TOKENS = 2**20  # of a sequence, or of all packed ones
MOST_SEQUENCES = 1024  # packed in one launch


def is_fused(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> bool:
    """Tell whether the attention operators take tensors, ``[B, N, S, D]`` or ``[T, N, D]``.

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
        and not (spec.needs_reference() or is_transformed())
        and (spec.sink is None or takes_sinks())
        and spec.dropout < 1
    )


def is_fused_varlen(sequences: SequenceEnds, band: Band) -> bool:
    """Tell whether the attention operators take packed sequences: no query of theirs may be without a key."""
    return max(sequences.ends[-1], sequences.key_ends[-1]) <= MOST_TOKENS and not any(
        queries and band.leaves_queries_without_keys(queries, keys) for queries, keys in sequences.lengths()
    )


def is_fused_indexer(query: Tensor, key: Tensor, count: int) -> bool:
    """Tell whether ``npu_lightning_indexer`` chooses ``count`` keys for ``[B, S_q, H, D]`` among ``[B, S_k, D]``.

    It takes weights in float32 since CANN 9.0: op-plugin 7.3.0, docs/context/torch_npu-npu_lightning_indexer.md; and,
    with its other limits (Atlas A2 and A3), 26.0.0, docs/zh/custom_APIs/torch_npu/torch_npu-npu_lightning_indexer.md.
    """
    return (
        CANN >= (9, 0)
        and query.device.type == "npu"
        and query.dtype == key.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[3] == _INDEXER_HEAD_SIZE
        and query.shape[2] <= 64
        and count in _TOP_K
        and query.numel() > 0
        and not is_distributed(query, key)
        and hasattr(torch.ops.npu, "npu_lightning_indexer")
    )


def reads_chosen_in_place(query: Tensor, latents: Tensor, rope: Tensor) -> bool:
    """Tell whether ``npu_sparse_flash_attention`` takes ``[B, S_q, N, D]``, latents and their rotary part.

    Its limits (Atlas A2 and A3), since CANN 8.5: op-plugin,
    docs/zh/custom_APIs/torch_npu/torch_npu-npu_sparse_flash_attention.md. It takes no sinks there.
    """
    return (
        CANN >= (8, 5)
        and query.device.type == "npu"
        and query.dtype == latents.dtype == rope.dtype
        and query.dtype in (torch.float16, torch.bfloat16)
        and (latents.shape[2], rope.shape[2]) == (LATENT_SIZE, ROPE_SIZE)
        and query.shape[2] in LATENT_HEADS
        and query.numel() > 0
        and not is_distributed(query, latents, rope)
        and hasattr(torch.ops.npu, "npu_sparse_flash_attention")
    )


def is_fused_indexer_loss(
    query: Tensor, key: Tensor, index_query: Tensor, index_key: Tensor, weights: Tensor, mask: Any, indices: Tensor
) -> bool:
    """Tell whether ``npu_sparse_lightning_indexer_grad_kl_loss`` takes what ``indexer_loss`` gets.

    Its limits (Atlas A2 and A3): op-plugin, docs/zh/custom_APIs/torch_npu/
    torch_npu-npu_sparse_lightning_indexer_grad_kl_loss.md. It takes weights in float32 from CANN 9.0 on:
    ops-transformer 9.0.0, sparse_lightning_indexer_grad_kl_loss_def.cpp. It looks for no -1 among indices, and reads as
    many as causal attention has keys: op_kernel there, ``GetS2SparseLen``.
    """
    (batch, queries, heads, _), (_, keys, groups, size), count = query.shape, key.shape, indices.shape[-1]
    return (
        CANN >= (9, 0)
        and (groups, size) == (1, LATENT_SIZE + ROPE_SIZE)
        and reads_chosen_in_place(query, key[:, :, 0, :LATENT_SIZE], key[:, :, 0, LATENT_SIZE:])
        and query.dtype == index_query.dtype == index_key.dtype
        and heads in (32, 64, 128)
        and index_query.shape[2] in (8, 16, 32, 64)
        and index_key.shape[2] == _INDEXER_HEAD_SIZE
        and batch <= 256
        and queries <= keys <= 2**17
        and count <= 8192
        and (count >= keys or count % 1024 == 0)
        and not isinstance(mask, Tensor)
        and mask.is_causal(queries, keys)
        and not is_distributed(index_query, index_key, weights)
        and hasattr(torch.ops.npu, "npu_sparse_lightning_indexer_grad_kl_loss")
    )


def needs_gradient(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Tell whether a gradient of one of the tensors is to be computed."""
    return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)


def fits_varlen_gradient(query: Tensor, key: Tensor, value: Tensor, band: Band | None) -> bool:
    """Tell whether no gradient of packed sequences is needed, or the gradient operator computes it.

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
    return not single and max(query.shape[-1], value.shape[-1]) <= _LARGEST_VARLEN_GRADIENT


def in_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors as autocast does before a product; return them as they are where it is off."""
    dtype = autocast_dtype(tensors[0])
    return tensors if dtype is None else tuple(tensor.to(dtype) for tensor in tensors)


def pad_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad heads with zeros, which change no score.

    The head size of the value may not exceed that of the key, and heads in float32 have to fill whole 16 bytes, as in
    torch_npu's scaled_dot_product_attention has them: op-plugin, ScaledDotProductAttentionKernelNpuOpApi.cpp.
    """
    alignment = 4 if query.dtype == torch.float32 else 1
    value_size = -(-value.shape[-1] // alignment) * alignment
    size = max(-(-query.shape[-1] // alignment) * alignment, value_size)
    return _pad_last_dim(query, size), _pad_last_dim(key, size), _pad_last_dim(value, value_size)


def _pad_last_dim(tensor: Tensor, size: int) -> Tensor:
    missing = size - tensor.shape[-1]
    return F.pad(tensor, (0, missing)) if missing else tensor
