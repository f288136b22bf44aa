"""Layer norms as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.arguments import check_tensors
from ._common.derivatives import is_transformed, needs_grad
from ._common.distributed import is_distributed

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def layer_norm(hidden_states: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` in float32, rounded once, by torch's own operator.

    That is CohereLayerNorm.forward of transformers, models/cohere/modeling_cohere.py. A weight or bias of several
    dimensions, as for the heads of queries, is multiplied and added behind the norm, in float32. Differentiable as
    often as torch's own operators are.

    Args:
        hidden_states: ``[..., H]``, of a floating dtype.
        weight: ``[H]`` or what broadcasts to ``hidden_states``, or None.
        bias: as weight.
        eps: added to the variance.

    Returns:
        ``[..., H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: a weight or bias does not broadcast to ``hidden_states``, or is on another device.
        TypeError: an argument is not floating point.
    """
    check_tensors(hidden_states=hidden_states, weight=weight, bias=bias)
    dtype, size = hidden_states.dtype, hidden_states.shape[-1:]
    _check("weight", weight, hidden_states)
    _check("bias", bias, hidden_states)
    if hidden_states.device.type == "npu" and dtype not in _FUSED_DTYPES:
        return _layer_norm_reference(hidden_states, weight, bias, eps)
    parts = [part for part in (weight, bias) if part is not None]
    if all(part.dtype is dtype and part.shape == size for part in parts):
        return F.layer_norm(hidden_states, size, weight, bias, eps).to(dtype)  # autocast gives float32
    y = F.layer_norm(hidden_states.float(), size, None, None, eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(dtype)


def add_layer_norm(hidden_states: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Compute the layer norm of ``hidden_states + residual``.

    It is one launch of ``npu_add_layer_norm``, which adds and norms in float32 and rounds once; torch rounds the sum
    first. In training it keeps the sum, as torch does, and torch's operator computes the gradient. What
    ``npu_add_layer_norm`` does not take is an addition and a norm.

    Args:
        hidden_states: ``[..., H]``, of a floating dtype.
        residual: ``[..., H]``, of the same shape and dtype.
        weight: ``[H]``.
        bias: ``[H]``.
        eps: added to the variance.

    Returns:
        ``[..., H]`` in the dtype of ``hidden_states``.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: an argument is not floating point.
    """
    if not is_add_layer_norm_fused(hidden_states, residual, weight, bias):
        _check_add(hidden_states, residual, weight, bias)
        return F.layer_norm(hidden_states + residual, weight.shape, weight, bias, eps)
    inputs = hidden_states, residual, weight, bias
    if needs_grad(*inputs):
        return _AddLayerNorm.apply(*inputs, eps)[0]
    return torch.ops.npu.npu_add_layer_norm(hidden_states, residual, weight, bias, eps, False)[0]


def is_add_layer_norm_fused(hidden_states: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Tell whether ``npu_add_layer_norm`` takes them (Atlas A2 and A3): CANN, aclnnAddLayerNorm."""
    dtype = hidden_states.dtype
    return (
        hidden_states.device.type == "npu"
        and dtype in _FUSED_DTYPES
        and dtype is residual.dtype is weight.dtype is bias.dtype
        and hidden_states.device == residual.device == weight.device == bias.device
        and hidden_states.shape == residual.shape
        and 2 <= hidden_states.dim() <= 8
        and hidden_states.numel() > 0
        and weight.shape == bias.shape == hidden_states.shape[-1:]
        and not torch.is_autocast_enabled("npu")
        and not (is_distributed(hidden_states, residual, weight, bias) or is_transformed())
    )


class _AddLayerNorm(torch.autograd.Function):
    """Launches ``npu_add_layer_norm``, and gives the norm and the sum, from which gradients are computed.

    The operator of its gradient has no meta kernel, and wants both summands; that of torch's norm has one, and wants
    the sum.
    """

    @staticmethod
    def forward(ctx, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, mean, rstd, total = torch.ops.npu.npu_add_layer_norm(x, residual, weight, bias, eps, True)
        ctx.save_for_backward(total, mean, rstd, weight, bias)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    def backward(ctx, grad: Tensor | None, d_sum: Tensor | None) -> tuple[Tensor | None, ...]:
        total, mean, rstd, weight, bias = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, needs_bias = ctx.needs_input_grad[:4]
        needs = [needs_x or needs_residual, needs_weight, needs_bias]
        d_weight = d_bias = None
        if grad is not None:
            d_total, d_weight, d_bias = torch.ops.aten.native_layer_norm_backward(
                grad, total, weight.shape, mean, rstd, weight, bias, needs
            )
            d_sum = d_total if d_sum is None else d_total + d_sum
        return (
            d_sum if needs_x else None,
            d_sum if needs_residual else None,
            d_weight if needs_weight else None,
            d_bias if needs_bias else None,
            None,
        )


def _check_add(hidden_states: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Raise what :func:`add_layer_norm` says of arguments that do not fit."""
    check_tensors(hidden_states=hidden_states, residual=residual, weight=weight, bias=bias)
    size = hidden_states.shape[-1:]
    if residual.shape != hidden_states.shape or not weight.shape == bias.shape == size:
        shapes = [list(tensor.shape) for tensor in (hidden_states, residual, weight, bias)]
        raise ValueError(
            "add_layer_norm: residual must have the shape of hidden_states [..., H], and weight and bias must be [H], "
            f"got hidden_states {shapes[0]}, residual {shapes[1]}, weight {shapes[2]} and bias {shapes[3]}"
        )


def _check(name: str, part: Tensor | None, hidden_states: Tensor) -> None:
    """Refuse what would not keep the shape of ``hidden_states``."""
    if part is None or part.shape == hidden_states.shape[-1:]:
        return
    dimensions = zip(reversed(part.shape), reversed(hidden_states.shape))
    if part.dim() > hidden_states.dim() or any(own not in (1, size) for own, size in dimensions):
        raise ValueError(
            f"layer_norm: {name} {list(part.shape)} must broadcast to hidden_states {list(hidden_states.shape)}"
        )


def _layer_norm_reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the same formula in torch, for dtypes that the NPU has no norm for."""
    apart = x - x.mean(-1, keepdim=True)
    y = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)
