"""The products that the gradients of a linear layer are, with each weight gradient laid out as its weight is.

torch_npu differentiates ``x @ weight.t()``: it gives the gradient of the transposed weight, which autograd then copies
into the layout of the weight. ``gradᵀ @ x`` lies as the weight does, and autograd takes it as it is.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# What npu_linear_backward takes. It has no page of its own: op-plugin, op_plugin/ops/opapi/LinearKernelNpuOpApi.cpp,
# calls aclnnMm twice, which is what torch.mm calls too.
_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weightᵀ + bias``, as no view: autograd lets nobody write to a view that a node of ours gives."""
    y = F.linear(x, weight, bias)
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def rows_of(x: Tensor) -> Tensor:
    """View, or copy, a tensor ``[..., H]`` as rows ``[T, H]``."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def of_input_and_weight(
    grad: Tensor, x: Tensor, weight: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the gradients of ``x @ weightᵀ``, in one call where both are wanted and nobody differentiates them.

    Args:
        grad: ``[T, N]``.
        x: ``[T, H]``.
        weight: ``[N, H]``.
        needs_x: whether the gradient of ``x`` is wanted.
        needs_weight: whether the gradient of ``weight`` is wanted.

    Returns:
        ``[T, H]`` and ``[N, H]``, or None for what is not wanted.
    """
    if needs_x and needs_weight and _is_fused(grad, x, weight):
        return torch.ops.npu.npu_linear_backward(grad, x, weight)
    return grad @ weight if needs_x else None, grad.t() @ x if needs_weight else None


def _is_fused(grad: Tensor, x: Tensor, weight: Tensor) -> bool:
    dtype = weight.dtype
    return (
        not torch.is_grad_enabled()  # the operator has no derivative
        and weight.device.type == "npu"
        and dtype in _FUSED_DTYPES
        and grad.dtype is x.dtype is dtype
        and grad.numel() > 0
        and x.numel() > 0
        and hasattr(torch.ops.npu, "npu_linear_backward")
    )
