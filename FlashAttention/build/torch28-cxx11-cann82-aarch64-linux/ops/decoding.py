"""One query over the keys of a cache: the operator that is made for it, which has no gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._common.cann import CANN
from ..attention_spec import FULL, Band, Options
from .limits import LATENT, LATENT_HEADS, ROTATED, is_fused, needs_gradient

_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD, _UNIT, _LARGEST_GROUP, _MOST_KEYS, _MOST_BATCHES = 512, 16, 64, 2**18, 2**16


class Rotated(NamedTuple):
    """Holds the rest of queries and keys, which lies apart: where keys are latents, the part that is rotated.

    Attributes:
        query: ``[B, N, S_q, R_r]``.
        key: ``[B, N_k, S_k, R_r]``.
    """

    query: Tensor
    key: Tensor


def is_decoding(query: Tensor, key: Tensor, value: Tensor, seen: Band | Tensor, options: Options) -> bool:
    """Tell whether ``npu_fused_infer_attention_score`` takes tensors ``[B, N, S, D]`` that ``attend`` takes on the NPU.

    Only one query that sees all keys does: with a mask the operator is wrong behind the 512th key. Its limits (Atlas A2
    and A3): op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md.
    """
    if isinstance(seen, Tensor) or query.shape[2] != 1 or seen.within(1, key.shape[2]) != FULL:
        return False
    return (
        not needs_gradient(query, key, value)
        and options.sink is None
        and not options.dropout
        and query.dtype in _DTYPES
        and query.shape[3] == value.shape[3] <= _LARGEST_HEAD
        and query.shape[3] % _UNIT == 0
        and query.shape[1] <= _LARGEST_GROUP * key.shape[1]
        and key.shape[2] <= _MOST_KEYS
        and query.shape[0] <= _MOST_BATCHES
    )


def decode(query: Tensor, key: Tensor, value: Tensor, options: Options) -> Tensor:
    """Compute attention of one query over all keys, without a gradient.

    Args:
        query: ``[B, N, 1, D]``.
        key: ``[B, N_k, S_k, D]``, best as it lies in a cache: in the order of its shape.
        value: likewise.
        options: the scale.

    Returns:
        ``[B, 1, N, D]``.
    """
    heads, key_heads = query.shape[1], key.shape[1]
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    out = torch.ops.npu.npu_fused_infer_attention_score(
        query,
        key,
        value,
        num_heads=heads,
        scale=options.scale,
        input_layout="BNSD",
        num_key_value_heads=key_heads,
    )[0]
    return out.transpose(1, 2)


def is_decoding_latents(
    query: Tensor, key: Tensor, value: Tensor, rotated: Rotated, seen: Any, options: Options
) -> bool:
    """Tell whether ``npu_fused_infer_attention_score`` takes latents, and their rotated part, as they lie in a cache.

    Only one query does. It may have a mask here, of which each block of 512 keys reads its own part: CANN's
    ops-transformer, fia_block_vec_nonquant_mla.h, ``ElewiseCompute``. The limits: fused_infer_attention_score/op_host
    there, ``CheckFeatureMlaNoquant``. Before CANN 8.5 latents have to lie in pages: op-plugin 7.2.0,
    docs/context/torch_npu-npu_fused_infer_attention_score.md.
    """
    is_full = isinstance(seen, Band) and seen.within(query.shape[2], key.shape[2]) == FULL
    return (
        CANN >= (8, 5)
        and value is key
        and query.shape[2] == 1
        and (is_full or (isinstance(seen, Tensor) and seen.shape[1] == 1))
        and (key.shape[1], key.shape[3], rotated.key.shape[3]) == (1, LATENT, ROTATED)
        and query.shape[1] in LATENT_HEADS
        and query.dtype in _DTYPES
        and key.shape[2] <= _MOST_KEYS
        and query.shape[0] <= _MOST_BATCHES
        and options.sink is None
        and not options.dropout
        and is_fused(query, key, value, options)
        and not needs_gradient(query, key, rotated.query)
        and not needs_gradient(query, key, rotated.key)
    )


def decode_latents(query: Tensor, latents: Tensor, rotated: Rotated, seen: Any, options: Options) -> Tensor:
    """Compute attention of one query over latents, which are keys and values, without a gradient.

    Args:
        query: ``[B, N, 1, R]``.
        latents: ``[B, 1, S_k, R]``, best as they lie in a cache: in the order of their shape.
        rotated: ``[B, N, 1, R_r]``, and ``[B, 1, S_k, R_r]`` as the latents.
        seen: a band of all keys, or what is left out, bool ``[B or 1, 1, 1, S_k]``.
        options: the scale.

    Returns:
        ``[B, 1, N, R]``. A query that sees no key gives zero.
    """
    heads, mask = query.shape[1], seen.contiguous() if isinstance(seen, Tensor) else None
    query, latents, query_rope, key_rope = (tensor.contiguous() for tensor in (query, latents, *rotated))
    out = torch.ops.npu.npu_fused_infer_attention_score(
        query,
        latents,
        latents,
        atten_mask=mask,
        query_rope=query_rope,
        key_rope=key_rope,
        num_heads=heads,
        scale=options.scale,
        input_layout="BNSD",
        num_key_value_heads=1,
    )[0]
    if mask is not None:  # of such a query the operator gives the mean of all values
        out.masked_fill_(mask.all(-1, keepdim=True), 0)
    return out.transpose(1, 2)
