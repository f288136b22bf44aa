"""aten operators that the device has and the CPU has not, written for CPU tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

FORMULAS: dict[str, Callable] = {}


def formula(*names: str) -> Callable:
    """Register the function below as the host's form of aten operators."""

    def register(function: Callable) -> Callable:
        FORMULAS.update(dict.fromkeys(names, function))
        return function

    return register


@formula("matmul_backward")
def matmul_backward(grad: Tensor, self: Tensor, other: Tensor, mask: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The gradients of ``torch.matmul``, which torch_npu differentiates as one operator."""
    left = self.unsqueeze(0) if self.dim() == 1 else self
    right = other.unsqueeze(-1) if other.dim() == 1 else other
    if self.dim() == 1:
        grad = grad.unsqueeze(-2 if other.dim() > 1 else 0)
    if other.dim() == 1:
        grad = grad.unsqueeze(-1)
    grad_self = (grad @ right.mH).sum_to_size(left.shape).reshape(self.shape) if mask[0] else None
    grad_other = (left.mH @ grad).sum_to_size(right.shape).reshape(other.shape) if mask[1] else None
    return grad_self, grad_other


@formula("histc", "histc.out")
def histc(self: Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: Tensor | None = None) -> Tensor:
    """``torch.histc`` with integers too; float64 holds every count and every bin edge that the device can."""
    result = torch.histc(self.double(), bins, min, max).to(self.dtype)
    return result if out is None else out.resize_(result.shape).copy_(result)


@formula("_copy_from_and_resize")
def copy_from_and_resize(self: Tensor, dst: Tensor) -> Tensor:
    """Called by torch's CPU fallback, for operators that torch_npu does not register."""
    return dst.resize_(self.size()).copy_(self)


@formula("mm.dtype", "bmm.dtype")
def product_with_dtype(self: Tensor, mat2: Tensor, out_dtype: torch.dtype) -> Tensor:
    return (self.to(out_dtype) @ mat2.to(out_dtype)).to(out_dtype)
