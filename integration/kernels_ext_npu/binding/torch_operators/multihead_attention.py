"""Lets torch's ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` call the kernel, while kernels are registered.

In inference torch calls operators for whole layers, its fast path. torch_npu has not all of them: layers of an encoder
run on the CPU, and rows with padding, which become nested tensors, end in an error. Without the fast path attention is
``scaled_dot_product_attention``; a boolean mask becomes one of floats for each head before, and here it does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.backends import mha
from torch.nn import functional as F

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.binding.torch_operators import sdpa

_REPOSITORY = "FlashAttention"
_Masks = tuple[Tensor | None, Tensor | None]


def install(patches: Patches) -> None:
    """Leave the fast path until `patches` are undone, and keep boolean masks.

    Do nothing where the kernel was left out.
    """
    if not (sdpa.IS_REPLACED and registration.uses(_REPOSITORY)):
        return
    patches.at_the_end(functools.partial(mha.set_fastpath_enabled, mha.get_fastpath_enabled()))
    mha.set_fastpath_enabled(False)
    patches.method(nn.MultiheadAttention, "forward", _forward, registration.is_active)


def _forward(
    original: Callable,
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    masks = key_padding_mask, attn_mask
    if not need_weights and _fits(self, query, key, value, masks, is_causal):
        q, k, v = (_heads(self, each) for each in _projected(self, query, key, value))
        is_causal = is_causal and key_padding_mask is None
        mask = None if is_causal else _merged(masks, q, k)
        attend: Callable = F.scaled_dot_product_attention
        if mask is not None and mask.is_floating_point():  # it was read already
            attend = functools.partial(sdpa.left_to_torch, attend)
        y = attend(q, k, v, mask, self.dropout if self.training else 0.0, is_causal).transpose(1, 2).flatten(2)
        y = F.linear(y, self.out_proj.weight, self.out_proj.bias)
        return y if self.batch_first else y.transpose(0, 1), None
    return original(self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)


def _fits(
    self: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, masks: _Masks, is_causal: bool
) -> bool:
    """Tell whether attention is that of queries, keys and values alone, with masks of one dtype."""
    if self.bias_k is not None or self.bias_v is not None or self.add_zero_attn or torch.compiler.is_compiling():
        return False
    if query.device.type != "npu" or any(
        type(each) not in sdpa.KINDS or each.dim() != 3 for each in (query, key, value)
    ):
        return False
    lengths = query.shape[:2], key.shape[:2]
    (batch, queries), (others, keys) = lengths if self.batch_first else (each[::-1] for each in lengths)
    if key.shape[:2] != value.shape[:2] or others != batch or query.shape[2] != self.embed_dim:
        return False
    given = [mask for mask in masks if mask is not None]
    if len({mask.dtype for mask in given} - {torch.bool, query.dtype}) or len({mask.dtype for mask in given}) > 1:
        return False
    padding, mask = masks
    allowed = (queries, keys), (batch * self.num_heads, queries, keys)
    return (padding is None or padding.shape == (batch, keys)) and (
        mask.shape in allowed if mask is not None else not is_causal
    )


def _projected(self: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Return queries, keys and values, by one product for those that are of one tensor."""
    weight, bias, size = self.in_proj_weight, self.in_proj_bias, self.embed_dim
    if weight is not None and query is key is value:
        return list(F.linear(query, weight, bias).chunk(3, -1))
    weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.split(size)
    biases = (None, None, None) if bias is None else bias.split(size)
    return [F.linear(*each) for each in zip((query, key, value), weights, biases)]


def _heads(self: nn.MultiheadAttention, x: Tensor) -> Tensor:
    """Return the heads of a projection, ``[B, N, S, D]``."""
    x = x.unflatten(-1, (self.num_heads, self.head_dim))
    return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)


def _merged(masks: _Masks, q: Tensor, k: Tensor) -> Tensor | None:
    """Return which keys a query sees, ``[B or 1, N or 1, S_q or 1, S_k]``; the sum of masks where one does more."""
    padding, mask = masks
    given = [] if padding is None else [padding[:, None, None]]
    if mask is not None:
        given.append(mask[None, None] if mask.dim() == 2 else mask.unflatten(0, (len(q), -1)))
    found = [~each if each.dtype is torch.bool else sdpa.as_boolean(each, q, k) for each in given]
    if not found:
        return None
    if all(each.dtype is torch.bool for each in found):
        return functools.reduce(torch.logical_and, found)
    return functools.reduce(torch.add, given)
