"""Keys and queries of length one, each with its scale."""

from __future__ import annotations

import torch
from torch import Tensor

from .transforms import is_transformed

_EPS = 1e-6  # of fla's l2norm, and transformers'


def unit(x: Tensor, scale: float) -> Tensor:
    """Compute ``x / sqrt(Σ x² + 1e-6) * scale`` of the last dimension of ``[..., D]`` in float32.

    That is an RMS norm with a weight, one launch of ``npu_rms_norm`` on the NPU: ``Σ x²`` is D times the mean.
    """
    if _is_fused(x):
        return torch.ops.npu.npu_rms_norm(x, _scale_as_weight(x, scale), _EPS / x.shape[-1])[0]
    return x * unit_factor(x) * scale


def unit_factor(x: Tensor) -> Tensor:
    """Compute ``1 / sqrt(Σ x² + 1e-6)`` of the last dimension of ``[..., D]``: ``[..., 1]`` in float32."""
    if is_transformed():  # a norm has no second derivative where it is zero
        return torch.rsqrt(x.float().square().sum(-1, keepdim=True) + _EPS)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    return torch.rsqrt(length.square() + _EPS)


def unit_gradient(grad: Tensor, x: Tensor, factor: Tensor, scale: float) -> Tensor:
    """Compute the gradient of x from that of ``x * factor * scale``, where the factor is that of :func:`unit_factor`.

    Args:
        grad: ``[M, C, D]`` in float32.
        x: likewise.
        factor: ``[M, C, 1]``.
        scale: what the unit vectors were multiplied with.
    """
    if _is_fused(x):
        weight = _scale_as_weight(x, scale)
        return torch.ops.npu.npu_rms_norm_backward(grad, x, weight, factor * x.shape[-1] ** 0.5)[0]
    direction, grad = x * factor, grad * scale
    return factor * torch.addcmul(grad, direction, (direction * grad).sum(-1, keepdim=True), value=-1)


def _scale_as_weight(x: Tensor, scale: float) -> Tensor:
    size = x.shape[-1]
    return torch.full((size,), scale * size**-0.5, dtype=x.dtype, device=x.device)


def _is_fused(x: Tensor) -> bool:
    return x.device.type == "npu" and x.numel() > 0 and not is_transformed()
