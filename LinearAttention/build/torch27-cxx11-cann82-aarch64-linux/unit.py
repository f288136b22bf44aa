"""Keys and queries of length one, each with its scale: one launch of ``npu_rms_norm`` on the NPU."""

from __future__ import annotations

import torch
from torch import Tensor

from .transforms import is_transformed

_EPS = 1e-6  # of fla's l2norm, and transformers'


def unit(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute ``x / sqrt(Σ x² + 1e-6) * scale`` of the last dimension, and the factor of each row.

    That is an RMS norm with a weight: ``Σ x²`` is D times the mean.

    Args:
        x: ``[M, C, D]`` in float32.
        scale: what the unit vectors are multiplied with.

    Returns:
        ``[M, C, D]``, and ``1 / sqrt(Σ x² + 1e-6)``, ``[M, C, 1]``, or ``sqrt(D)`` times that where the operator ran.
    """
    size = x.shape[-1]
    if _is_fused(x):
        return torch.ops.npu.npu_rms_norm(x, _scale_as_weight(x, scale), _EPS / size)
    factor = torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)
    return x * factor * scale, factor


def unit_gradient(grad: Tensor, x: Tensor, factor: Tensor, scale: float) -> Tensor:
    """Compute the gradient of x, ``[M, C, D]``, from what :func:`unit` returned as its factor."""
    if _is_fused(x):
        return torch.ops.npu.npu_rms_norm_backward(grad, x, _scale_as_weight(x, scale), factor)[0]
    direction, grad = x * factor, grad * scale
    return factor * torch.addcmul(grad, direction, (direction * grad).sum(-1, keepdim=True), value=-1)


def _scale_as_weight(x: Tensor, scale: float) -> Tensor:
    size = x.shape[-1]
    return torch.full((size,), scale * size**-0.5, dtype=x.dtype, device=x.device)


def _is_fused(x: Tensor) -> bool:
    return x.device.type == "npu" and x.numel() > 0 and not is_transformed()
