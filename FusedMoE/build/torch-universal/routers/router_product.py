"""The product of a router that compares in float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common import split_bf16
from .._common.derivatives import gradients, is_transformed
from .._common.distributed import is_distributed

_NARROW = (torch.float16, torch.bfloat16)


def float32_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``F.linear(x.float(), weight.float())``, without casts where no gradient is needed, or much is bfloat16.

    The device multiplies float16 and bfloat16 exactly and adds up in float32, so that float32 inputs with the same
    values give no more; ``torch.mm`` with a dtype of its own for the result says so since op-plugin 26.1
    (MmKernelNpuOpApi.cpp). It has no derivative.

    Args:
        x: ``[T, H]``, of a floating dtype.
        weight: ``[E, H]``.

    Returns:
        ``[T, E]``, float32; under autocast in its dtype, as F.linear gives it.

    Raises:
        TypeError: ``x`` is not floating point.
        ValueError: ``weight`` is on another device.
    """
    if not x.is_floating_point():
        raise TypeError(f"float32_logits: x must be floating point, got {x.dtype}")
    if x.device != weight.device:
        raise ValueError(f"float32_logits: weight must be on {x.device}, got {weight.device}")
    if not _is_fused(x, weight):
        return _in_torch(x, weight)
    if not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)):
        return _wide_product(x, weight)
    return _Float32Logits.apply(x, weight) if split_bf16.takes(x, torch.float32) else _in_torch(x, weight)


class _Float32Logits(torch.autograd.Function):
    """Computes them of what is not cast, and keeps that. Their gradient, in float32, is cut into pieces of bfloat16."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _wide_product(x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            return tuple(gradients(_in_torch, (x, weight), ctx.needs_input_grad, grad))
        needs_x, needs_weight = ctx.needs_input_grad
        pieces = split_bf16.split_into_bf16(grad).transpose(0, 1).flatten(1)  # side by side
        d_x = pieces @ weight.repeat(3, 1) if needs_x else None
        if not needs_weight:
            return d_x, None
        d_weight = torch.mm(pieces.t(), x, out_dtype=torch.float32).unflatten(0, (3, -1)).sum(0)
        return d_x, d_weight.to(weight.dtype)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the product of 16 bits in float32."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def _in_torch(x: Tensor, weight: Tensor) -> Tensor:
    """Compute it from casts, as routers of transformers do."""
    return F.linear(x.float(), weight.float())


def _is_fused(x: Tensor, weight: Tensor) -> bool:
    """Tell whether one product does: of what the device takes, in a release that has it."""
    if x.dtype not in _NARROW or x.dtype is not weight.dtype or x.device.type != "npu" or not x.numel():
        return False
    transformed = is_transformed() or is_distributed(x, weight) or torch.is_autocast_enabled("npu")
    return not transformed and split_bf16.has_wide_result()
