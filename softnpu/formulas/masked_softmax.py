"""Define npu_scaled_masked_softmax, ``softmax(mask(scale · x))`` over the last dimension, and its gradient.

op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_scaled_masked_softmax.md. Rounding is inferred: float32, rounded
once. No source says what stands in a row that is masked as a whole: it is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes, require_values
from softnpu.formulas import formula


@formula
def npu_scaled_masked_softmax(x: Tensor, mask: Tensor, scale: float = 1, fixed_triu_mask: bool = False) -> Tensor:
    """Leave out where the mask, bool and of a shape that broadcasts to x [N, C, H, W], is True."""
    operator = "npu_scaled_masked_softmax"
    require_dtypes(operator, {(d, torch.bool) for d in FLOATING}, x=x, mask=mask)
    mask = _require(operator, x, mask, fixed_triu_mask)
    require_values(not bool(mask.all(-1).any()), operator, "the mask leaves a row nothing, which no source defines")
    y = torch.softmax((x.float() * scale).masked_fill(mask, -torch.inf), -1)
    return y.to(x.dtype).contiguous()


@formula
def npu_scaled_masked_softmax_backward(
    y_grad: Tensor, y: Tensor, mask: Tensor, scale: float, fixed_triu_mask: bool
) -> Tensor:
    """Compute ``scale · y · (dy - Σ dy · y)``, zero where the mask is True."""
    operator = "npu_scaled_masked_softmax_backward"
    require_dtypes(operator, {(d, d, torch.bool) for d in FLOATING}, y_grad=y_grad, y=y, mask=mask)
    require(y_grad.shape == y.shape, operator, f"dy {describe(y_grad)} and y {describe(y)} differ in shape")
    mask = _require(operator, y, mask, fixed_triu_mask)
    dy, out = y_grad.float(), y.float()
    dx = scale * out * (dy - (dy * out).sum(-1, keepdim=True))
    return dx.masked_fill(mask, 0.0).to(y_grad.dtype).contiguous()


def _require(operator: str, x: Tensor, mask: Tensor, fixed: bool) -> Tensor:
    require(not fixed, operator, "fixed_triu_mask must be False")
    fits = x.dim() == 4 and all(32 <= n <= 4096 and n % 32 == 0 for n in x.shape[-2:])
    require(fits, operator, f"x must be [N, C, H, W], H and W 32 to 4096 by 32, got {describe(x)}")
    fits = mask.dim() <= 4 and all(m in (1, n) for m, n in zip(reversed(mask.shape), reversed(x.shape)))
    require(fits, operator, f"mask {describe(mask)} does not broadcast to {describe(x)}")
    return mask.expand(x.shape)
