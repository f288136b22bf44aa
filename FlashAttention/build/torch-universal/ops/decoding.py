"""Decoding: attention of one query to a key and value cache, by an operator for inference that has no gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common.cann import CANN
from ..attention_spec import FULL, AttentionSpec, Band
from .limits import LATENT_HEADS, LATENT_SIZE, ROPE_SIZE, is_fused, needs_gradient

_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD, _HEAD_ALIGNMENT, _LARGEST_GROUP, _MOST_KEYS, _MOST_BATCHES = 512, 16, 64, 2**18, 2**16


class RotaryPart(NamedTuple):
    """Holds the part of MLA's queries and keys that has rotary positions, in tensors of its own.

    Attributes:
        query: ``[B, N, S_q, R_r]``.
        key: ``[B, N_k, S_k, R_r]``.
    """

    query: Tensor
    key: Tensor


def is_decoding(query: Tensor, key: Tensor, value: Tensor, masking: Band | Tensor, spec: AttentionSpec) -> bool:
    """Tell whether ``npu_fused_infer_attention_score`` takes tensors ``[B, N, S, D]`` that ``is_fused`` allows.

    It takes one query that sees all keys: with a mask the operator is wrong behind the 512th key. Its limits (Atlas A2
    and A3): op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md.
    """
    if isinstance(masking, Tensor) or query.shape[2] != 1 or masking.within(1, key.shape[2]) != FULL:
        return False
    return (
        not needs_gradient(query, key, value)
        and spec.sink is None
        and not spec.dropout
        and query.dtype in _DTYPES
        and query.shape[3] == value.shape[3] <= _LARGEST_HEAD
        and query.shape[3] % _HEAD_ALIGNMENT == 0
        and query.shape[1] <= _LARGEST_GROUP * key.shape[1]
        and key.shape[2] <= _MOST_KEYS
        and query.shape[0] <= _MOST_BATCHES
    )


def is_decoding_mla(
    query: Tensor, key: Tensor, value: Tensor, rotated: RotaryPart, masking: Any, spec: AttentionSpec
) -> bool:
    """Tell whether ``npu_fused_infer_attention_score`` computes MLA's attention to a cache of latents and rotary parts.

    It does for one query. A mask is right here: each block of 512 keys reads its own part of it: CANN's
    ops-transformer, fia_block_vec_nonquant_mla.h, ``ElewiseCompute``. The limits: fused_infer_attention_score/op_host
    there, ``CheckFeatureMlaNoquant``. Before CANN 8.5 latents have to lie in pages: op-plugin 7.2.0,
    docs/context/torch_npu-npu_fused_infer_attention_score.md.
    """
    is_full = isinstance(masking, Band) and masking.within(query.shape[2], key.shape[2]) == FULL
    return (
        CANN >= (8, 5)
        and value is key
        and query.shape[2] == 1
        and (is_full or (isinstance(masking, Tensor) and masking.shape[1] == 1))
        and (key.shape[1], key.shape[3], rotated.key.shape[3]) == (1, LATENT_SIZE, ROPE_SIZE)
        and query.shape[1] in LATENT_HEADS
        and query.dtype in _DTYPES
        and key.shape[2] <= _MOST_KEYS
        and query.shape[0] <= _MOST_BATCHES
        and spec.sink is None
        and not spec.dropout
        and is_fused(query, key, value, spec)
        and not needs_gradient(query, key, rotated.query)
        and not needs_gradient(query, key, rotated.key)
    )


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spec: AttentionSpec,
    rotary: RotaryPart | None = None,
    masking: Any = None,
) -> Tensor:
    """Compute attention of one query over keys, without a gradient.

    Args:
        query: ``[B, N, 1, D]``.
        key: ``[B, N_k, S_k, D]``, copied unless it is contiguous.
        value: likewise; MLA's latents are keys and values in one.
        spec: only the scale counts.
        rotary: the rotary part beside latents.
        masking: a band of all keys; or beside latents bool ``[B or 1, 1, 1, S_k]``, True where a key is masked out.

    Returns:
        ``[B, 1, N, D]``. A query that sees no key gives zero.
    """
    heads, key_heads = query.shape[1], key.shape[1]
    query, keys = query.contiguous(), key.contiguous()
    values = keys if value is key else value.contiguous()
    query_rope, key_rope = (None, None) if rotary is None else (part.contiguous() for part in rotary)
    mask = masking.contiguous() if isinstance(masking, Tensor) else None
    out = torch.ops.npu.npu_fused_infer_attention_score(
        query,
        keys,
        values,
        atten_mask=mask,
        query_rope=query_rope,
        key_rope=key_rope,
        num_heads=heads,
        scale=spec.scale,
        input_layout="BNSD",
        num_key_value_heads=key_heads,
    )[0]
    if mask is not None:  # for a query that sees no key the operator returns the mean of all values
        out.masked_fill_(mask.all(-1, keepdim=True), 0)
    return out.transpose(1, 2)
