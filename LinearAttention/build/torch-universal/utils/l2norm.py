"""The L2 norm of keys and queries, with a scale.

``x / sqrt(Σ x² + 1e-6) * scale`` is an RMS norm whose weight is ``scale / sqrt(D)``: ``Σ x²`` is D times the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.derivatives import is_transformed

_EPS = 1e-6  # of fla's l2norm, and transformers'


def l2norm(x: Tensor, scale: float) -> Tensor:
    """Compute ``x / sqrt(Σ x² + 1e-6) * scale`` over the last dimension of ``[..., D]`` in float32."""
    if _is_fused(x):
        return torch.ops.npu.npu_rms_norm(x, _filled_row(x, _rms_weight(x, scale)), _EPS / x.shape[-1])[0]
    return x * l2norm_factor(x, scale)


def l2norm_factor(x: Tensor, scale: float) -> Tensor:
    """Compute ``scale / sqrt(Σ x² + 1e-6)`` over the last dimension of ``[..., D]``: ``[..., 1]`` in float32.

    On the NPU it is made of the second result of ``npu_rms_norm``, and the first one is dropped: that operator reads x
    in its own dtype, while torch's norm casts it to float32 first (aclnnLinalgVectorNorm, ``dtype``).
    """
    eps = _EPS / x.shape[-1]
    if _is_fused(x):
        inverse_rms = torch.ops.npu.npu_rms_norm(x, _filled_row(x, 1.0), eps)[1]
    else:
        inverse_rms = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return inverse_rms * _rms_weight(x, scale)


def l2norm_gradient(grad: Tensor, normed: Tensor, scale: float) -> Tensor:
    """Compute the gradient of x, ``[M, C, D]`` in float32, without the factor of :func:`l2norm_factor`.

    Args:
        grad: the gradient of what :func:`l2norm` returned.
        normed: what it returned, which has the direction of x.
        scale: what it was given.
    """
    weight = _rms_weight(normed, scale) or 1.0  # for a scale of 0 the factor, which is 0, follows
    if _is_fused(normed):  # the operator takes what was normed and 1 / its RMS; here that RMS is the weight
        inverse_rms = torch.full((*normed.shape[:-1], 1), 1 / weight, dtype=torch.float32, device=normed.device)
        return torch.ops.npu.npu_rms_norm_backward(grad, normed, _filled_row(normed, weight), inverse_rms)[0]
    projection = (normed * grad).mean(-1, keepdim=True)
    return torch.addcmul(grad, normed, projection, value=-1 / weight**2)


def _rms_weight(x: Tensor, scale: float) -> float:
    """Return the weight of the RMS norm that is the L2 norm with this scale."""
    return scale * x.shape[-1] ** -0.5


def _filled_row(x: Tensor, value: float) -> Tensor:
    return torch.full((x.shape[-1],), value, dtype=x.dtype, device=x.device)


def _is_fused(x: Tensor) -> bool:
    return x.device.type == "npu" and x.dtype is not torch.float64 and x.numel() > 0 and not is_transformed()
