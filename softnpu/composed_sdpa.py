"""Compose ``scaled_dot_product_attention`` for the releases whose own calls kernels of the runtime directly.

Before op-plugin 26.0 torch_npu prepares the mask below the dispatcher, which ends in a kernel launch. What it does is
composed of operators here: op-plugin, op_plugin/ops/opapi/ScaledDotProductAttentionKernelNpuOpApi.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MOST_HEADS, _LARGEST_HEAD = 2048, 512
_CAUSAL_MASK = 2048  # its size, whatever the lengths are
_UNBOUNDED = 2147483647
_LEFT_UP_CAUSAL = 2  # sparse_mode
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def prepares_masks_directly() -> bool:
    """Tell whether torch_npu's own cannot run here: since it calls version 3 of its attention, it is all operators."""
    return not hasattr(torch.ops.npu, "npu_fusion_attention_v3")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Call ``npu_fusion_attention`` where it takes the tensors, else the attention that torch composes."""
    if is_causal and attn_mask is not None:
        raise RuntimeError("scaled_dot_product_attention: attn_mask must be None where is_causal is True")
    if not _is_fused(query, key, value, attn_mask):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
        )[0]
    mask = None if attn_mask is None else attn_mask.logical_not()
    if is_causal:
        mask = torch.ones(_CAUSAL_MASK, _CAUSAL_MASK, dtype=torch.bool, device=query.device).triu(1)
    return torch.ops.npu.npu_fusion_attention(
        query,
        key,
        value,
        query.shape[1],
        "BNSD",
        atten_mask=mask,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        keep_prob=1 - dropout_p,
        pre_tockens=_UNBOUNDED,
        next_tockens=0 if is_causal else _UNBOUNDED,
        sparse_mode=_LEFT_UP_CAUSAL if is_causal else 0,
    )[0]


def _is_fused(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    return (
        query.dtype in _DTYPES
        and (mask is None or (mask.dtype == torch.bool and mask.dim() in (2, 4)))
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[1] <= _MOST_HEADS
        and query.shape[3] <= _LARGEST_HEAD
        and 0 < key.shape[1] <= query.shape[1]
        and query.shape[1] % key.shape[1] == 0
    )
