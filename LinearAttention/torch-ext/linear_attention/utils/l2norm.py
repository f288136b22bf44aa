"""Keys and queries of length one, each with its scale.

``x / sqrt(Σ x² + 1e-6) * scale`` is an RMS norm whose weight is ``scale / sqrt(D)``: ``Σ x²`` is D times the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.functorch import is_transformed

_EPS = 1e-6  # of fla's l2norm, and transformers'


def unit(x: Tensor, scale: float) -> Tensor:
    """Compute ``x / sqrt(Σ x² + 1e-6) * scale`` of the last dimension of ``[..., D]`` in float32."""
    if _is_fused(x):
        return torch.ops.npu.npu_rms_norm(x, _rows_of(x, _weight_of(x, scale)), _EPS / x.shape[-1])[0]
    return x * unit_factor(x, scale)


def unit_factor(x: Tensor, scale: float) -> Tensor:
    """Compute ``scale / sqrt(Σ x² + 1e-6)`` of the last dimension of ``[..., D]``: ``[..., 1]`` in float32.

    On the NPU it comes from what ``npu_rms_norm`` gives beside its result, which is left: it reads x as it is, where a
    norm of torch's casts it first (aclnnLinalgVectorNorm, ``dtype``).
    """
    eps = _EPS / x.shape[-1]
    if _is_fused(x):
        inverse = torch.ops.npu.npu_rms_norm(x, _rows_of(x, 1.0), eps)[1]
    else:
        inverse = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return inverse * _weight_of(x, scale)


def unit_gradient(grad: Tensor, found: Tensor, scale: float) -> Tensor:
    """Compute the gradient of x, ``[M, C, D]`` in float32, but for what :func:`unit_factor` gives of it.

    Args:
        grad: the gradient of what :func:`unit` gave.
        found: what it gave, which lies in the direction of x.
        scale: of it.
    """
    weight = _weight_of(found, scale) or 1.0  # a factor of 0 follows
    if _is_fused(found):  # which takes any root mean square for that of what was normed: here it is the weight
        of_weight = torch.full((*found.shape[:-1], 1), 1 / weight, dtype=torch.float32, device=found.device)
        return torch.ops.npu.npu_rms_norm_backward(grad, found, _rows_of(found, weight), of_weight)[0]
    along = (found * grad).mean(-1, keepdim=True)
    return torch.addcmul(grad, found, along, value=-1 / weight**2)


def _weight_of(x: Tensor, scale: float) -> float:
    """Return what a vector over its root mean square is multiplied with."""
    return scale * x.shape[-1] ** -0.5


def _rows_of(x: Tensor, value: float) -> Tensor:
    return torch.full((x.shape[-1],), value, dtype=x.dtype, device=x.device)


def _is_fused(x: Tensor) -> bool:
    return x.device.type == "npu" and x.dtype is not torch.float64 and x.numel() > 0 and not is_transformed()
