"""One query over all keys of a cache: the operator that is made for it, which has no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import needs_gradient
from .options import FULL, Band, Options

_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD, _UNIT, _LARGEST_GROUP, _MOST_KEYS, _MOST_BATCHES = 512, 16, 64, 2**18, 2**16


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
