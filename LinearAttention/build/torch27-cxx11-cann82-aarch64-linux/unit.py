"""Keys and queries of length one, each with its scale.

``x / sqrt(Σ x² + 1e-6) * scale`` is an RMS norm whose weight is ``scale / sqrt(D)``: ``Σ x²`` is D times the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .transforms import is_transformed

_EPS = 1e-6  # of fla's l2norm, and transformers'


def unit(x: Tensor, scale: float) -> Tensor:
    """Compute ``x / sqrt(Σ x² + 1e-6) * scale`` of the last dimension of ``[..., D]`` in float32."""
    if _is_fused(x):
        return torch.ops.npu.npu_rms_norm(x, _scale_of_rows(x, scale), _EPS / x.shape[-1])[0]
    return x * (inverse_rms(x) * weight_of(x, scale))


def weight_of(x: Tensor, scale: float) -> float:
    """Return what a vector over its root mean square is multiplied with."""
    return scale * x.shape[-1] ** -0.5


def inverse_rms(x: Tensor) -> Tensor:
    """Compute ``1 / sqrt((Σ x² + 1e-6) / D)`` of the last dimension of ``[..., D]``: ``[..., 1]`` in float32.

    On the NPU that is what ``npu_rms_norm`` gives beside its result, which is left: it reads x as it is, where a norm
    of torch's casts it first (aclnnLinalgVectorNorm, ``dtype``).
    """
    eps = _EPS / x.shape[-1]
    if _is_fused(x):
        return torch.ops.npu.npu_rms_norm(x, x.new_ones(x.shape[-1]), eps)[1]
    return torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)


def unit_gradient(grad: Tensor, x: Tensor, inverse: Tensor, scale: float) -> Tensor:
    """Compute the gradient of x, ``[M, C, D]``, from that of :func:`unit` and what :func:`inverse_rms` gave."""
    if _is_fused(x):
        return torch.ops.npu.npu_rms_norm_backward(grad, x, _scale_of_rows(x, scale), inverse)[0]
    direction, grad = x * inverse, grad * weight_of(x, scale)
    return inverse * torch.addcmul(grad, direction, (direction * grad).mean(-1, keepdim=True), value=-1)


def _scale_of_rows(x: Tensor, scale: float) -> Tensor:
    return torch.full((x.shape[-1],), weight_of(x, scale), dtype=x.dtype, device=x.device)


def _is_fused(x: Tensor) -> bool:
    return x.device.type == "npu" and x.dtype is not torch.float64 and x.numel() > 0 and not is_transformed()
