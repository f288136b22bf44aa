"""Define the gradients of aten operators that torch_npu differentiates with operators of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from softnpu.aten_missing_on_cpu import as_matrices
from softnpu.formulas import formula

NONE, MEAN = 0, 1  # at::Reduction


@formula
def l1_loss_backward(grad_output: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor:
    return _spread(grad_output, input, target, reduction) * torch.sign(input - target)


@formula
def kl_div_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, reduction: int = MEAN, *, log_target: bool = False
) -> Tensor:
    weight = target.exp() if log_target else target.clamp(min=0)
    return (-weight * _spread(grad_output, input, target, reduction)).sum_to_size(input.shape)


@formula
def kl_div_target_backward(
    grad_output: Tensor, input: Tensor, target: Tensor, reduction: int = MEAN, *, log_target: bool = False
) -> Tensor:
    if log_target:
        slope = target.exp() * (target + 1 - input)
    else:
        slope = torch.where(target > 0, target.log() + 1 - input, torch.zeros_like(target))
    return (slope * _spread(grad_output, input, target, reduction)).sum_to_size(target.shape)


@formula
def npu_binary_cross_entropy_with_logits_backward(
    grad_output: Tensor,
    input: Tensor,
    target: Tensor,
    weight_opt: Tensor | None,
    pos_weight_opt: Tensor | None,
    reduction: int,
) -> Tensor:
    positive = target if pos_weight_opt is None else pos_weight_opt * target
    slope = (positive + 1 - target) * torch.sigmoid(input) - positive
    if weight_opt is not None:
        slope = slope * weight_opt
    return slope * _spread(grad_output, input, target, reduction)


@formula
def repeat_interleave_backward_int(grad: Tensor, input: Tensor, repeats: int, dim: int | None = None) -> Tensor:
    shape = list(input.shape) if dim is not None else [input.numel()]
    axis = (dim or 0) % max(len(shape), 1)
    return grad.reshape(*shape[: axis + 1], repeats, *shape[axis + 1 :]).sum(axis + 1).reshape(input.shape)


@formula
def repeat_interleave_backward_tensor(grad: Tensor, input: Tensor, repeats: Tensor, dim: int | None = None) -> Tensor:
    source = input if dim is not None else input.flatten()
    axis = dim or 0
    counts = repeats.expand(source.shape[axis]) if repeats.numel() == 1 else repeats
    origins = torch.repeat_interleave(torch.arange(source.shape[axis]), counts)
    return torch.zeros_like(source).index_add_(axis, origins, grad).reshape(input.shape)


@formula
def npu_renorm_backward(grad: Tensor, input: Tensor, p: float, dim: int, maxnorm: float) -> Tensor:
    """Compute torch's formula: the scale of a slice beyond the limit is ``maxnorm / (norm + 1e-7)``."""
    others = [d for d in range(input.dim()) if d != dim % input.dim()]
    norm = torch.linalg.vector_norm(input, p, others, keepdim=True)
    slope = torch.zeros_like(input) if p == 0 else _norm_slope(input, norm, p)
    limit = norm + 1e-7
    through_norm = (grad * input).sum(others, keepdim=True) * slope / limit
    return torch.where(norm > maxnorm, (grad - through_norm) * maxnorm / limit, grad)


@formula
def matmul_double_backward(
    grad_self: Tensor | None,
    grad_other: Tensor | None,
    grad_out: Tensor | None,
    input: Tensor,
    other: Tensor,
    mask: list[bool],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of ``matmul_backward``'s arguments: ``grad_out``, the left and the right factor.

    There are none where that had no ``grad_out``: op-plugin, MatmulDoubleBackwardKernelNpuOpApi.cpp.
    """
    if grad_out is None:
        return None, None, None
    a, b = as_matrices(input, other)
    g = grad_out.reshape(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    through_a = None if grad_self is None else grad_self.reshape(a.shape)
    through_b = None if grad_other is None else grad_other.reshape(b.shape)
    parts = [x @ y for x, y in ((through_a, b), (a, through_b)) if x is not None and y is not None]
    d_grad = torch.stack(parts).sum(0).reshape(grad_out.shape) if mask[0] and parts else None
    d_input = (
        (g @ through_b.mH).sum_to_size(a.shape).reshape(input.shape) if mask[1] and through_b is not None else None
    )
    d_other = (
        (through_a.mH @ g).sum_to_size(b.shape).reshape(other.shape) if mask[2] and through_a is not None else None
    )
    return d_grad, d_input, d_other


def _norm_slope(x: Tensor, norm: Tensor, p: float) -> Tensor:
    """Compute d norm / d x."""
    if p == float("inf"):
        largest = x.abs() == norm
        return x.sign() * largest / largest.sum([d for d in range(x.dim()) if norm.shape[d] == 1], keepdim=True)
    return torch.nan_to_num(x.sign() * x.abs().pow(p - 1) / norm.pow(p - 1))


def _spread(grad: Tensor, input: Tensor, target: Tensor, reduction: int) -> Tensor:
    """Expand the gradient of a loss to every element's loss."""
    shape = torch.broadcast_shapes(input.shape, target.shape)
    return grad.expand(shape) / shape.numel() if reduction == MEAN else grad.expand(shape)
