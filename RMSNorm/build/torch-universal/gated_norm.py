"""A norm, and a gate behind it: of 16 bits as a node that keeps its arguments alone, and a number a row."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.derivatives import by_formula, gradients
from ._common.distributed import is_distributed
from .functional import is_rms_norm_fused, unchecked_rms_norm


class NormGate(NamedTuple):
    """Says what a gate goes through, and how it is multiplied with a vector behind or before it.

    Attributes:
        activation: the function of the gate.
        product: takes both, one behind the other, ``[2 N]``, and may write over them.
        gradient: takes the gradient of that, and both, likewise.
        is_first: whether the gate comes first in both.
    """

    activation: Callable[[Tensor], Tensor]
    product: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    is_first: bool

    def ordered(self, gate: Any, other: Any) -> tuple[Any, Any]:
        """Return both in their order; what is in that order comes back as gate and other."""
        return (gate, other) if self.is_first else (other, gate)


def _times_sigmoid(both: Tensor) -> Tensor:
    """Multiply the first half with the sigmoid of the second.

    It is ``glu``, whose gradient is seven kernels, which cut both apart and join them; before CANN 9.0 it is three
    itself: ops-nn, activation/sigmoid, aclnn_glu_backward.cpp.
    """
    first, second = both.view(2, -1).unbind()
    return second.sigmoid_().mul_(first)


def _times_sigmoid_gradient(grad: Tensor, both: Tensor) -> Tensor:
    first, second = both.view(2, -1).unbind()
    found, sigmoid = torch.empty_like(both), second.sigmoid_()
    d_first, d_second = found.view(2, -1).unbind()
    torch.mul(grad, sigmoid, out=d_first)
    torch.ops.aten.sigmoid_backward.grad_input(torch.mul(grad, first, out=d_second), sigmoid, grad_input=d_second)
    return found


_SILU = NormGate(
    F.silu,
    lambda both: torch.ops.npu.npu_swiglu(both, -1),
    lambda grad, both: torch.ops.npu.npu_swiglu_backward(grad, both, -1),
    is_first=True,
)
_SIGMOID = NormGate(torch.sigmoid, _times_sigmoid, _times_sigmoid_gradient, is_first=False)
GATES = {"silu": _SILU, "swish": _SILU, "sigmoid": _SIGMOID}


def gated_norm(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: NormGate, rounds_norm: bool = False
) -> Tensor:
    """Compute ``(weight * x_normed * activation(gate)).to(x.dtype)`` in float32.

    Args:
        x: ``[..., H]``, of a floating dtype.
        gate: likewise.
        weight: ``[H]``.
        eps: added to the mean.
        kind: says which activation.
        rounds_norm: whether the norm may be rounded to the dtype of x before the gate; it is with SiLU, if the gate and
            the weight have that dtype too.
    """
    if not _is_fused(x, gate, weight):
        return _gated_norm_reference(x, gate, weight, eps, kind)
    is_rounded = rounds_norm and kind is _SILU and gate.dtype is weight.dtype is x.dtype
    is_compiling = torch.compiler.is_compiling()
    if is_rounded and (is_compiling or not torch.is_grad_enabled()):
        return _SILU.product(_concatenated(gate, unchecked_rms_norm(x, weight, eps))).view(x.shape)
    if is_compiling:
        return _gated_norm_reference(x, gate, weight, eps, kind)
    return _RoundedGatedNorm.apply(x, gate, weight, eps) if is_rounded else _GatedNorm.apply(x, gate, weight, eps, kind)


class _RoundedGatedNorm(torch.autograd.Function):
    """Computes the norm in 16 bits, and then the gate: an operator for each, which compute in float32.

    A second derivative, and several gradients at once, go through :func:`_gated_norm_reference`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, rstd = torch.ops.npu.npu_rms_norm(x, weight, eps)
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.eps = eps
        return _SILU.product(_concatenated(gate, normed)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors  # once: checkpoints refuse a second look
        if by_formula(grad):
            function = partial(_gated_norm_reference, eps=ctx.eps, kind=_SILU)
            return *gradients(function, (x, gate, weight), ctx.needs_input_grad[:3], grad), None
        both = _concatenated(gate, torch.ops.npu.npu_rms_norm(x, weight, ctx.eps)[0])
        d_gate, d_normed = _SILU.gradient(grad.reshape(-1), both).view(2, *x.shape).unbind()
        grad_x, grad_weight = torch.ops.npu.npu_rms_norm_backward(d_normed, x, weight, rstd)
        return grad_x, d_gate, grad_weight.to(weight.dtype), None


class _GatedNorm(torch.autograd.Function):
    """Computes ``weight`` times the product of two halves of one tensor in float32: the normed x and the gate.

    A second derivative, and several gradients at once, go through :func:`_gated_norm_reference`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: NormGate) -> Tensor:
        rstd = torch.ops.npu.npu_rms_norm(x, weight.to(x.dtype), eps)[1]  # whatever the weight is
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.eps, ctx.kind = eps, kind
        product = kind.product(_gate_and_normed(x, gate, rstd, kind)).view(x.shape)
        return torch.mul(product, weight, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors  # once: checkpoints refuse a second look
        kind = ctx.kind
        if by_formula(grad):
            function = partial(_gated_norm_reference, eps=ctx.eps, kind=kind)
            return *gradients(function, (x, gate, weight), ctx.needs_input_grad[:3], grad), None, None
        both = _gate_and_normed(x, gate, rstd, kind)
        d_both = kind.gradient(grad.reshape(-1).float(), both).view(2, *x.shape)
        d_gate, d_normed = kind.ordered(*d_both.unbind())
        normed = kind.ordered(*both.view(2, *x.shape).unbind())[1]
        grad_gate = torch.mul(d_gate, weight, out=torch.empty(x.shape, dtype=gate.dtype, device=x.device))
        # the normed x has a root mean square of one
        wide, ones = weight.float(), torch.ones_like(rstd)
        along, grad_weight = torch.ops.npu.npu_rms_norm_backward(d_normed, normed, wide, ones)
        grad_x = torch.mul(along, rstd, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None


def _concatenated(gate: Tensor, normed: Tensor) -> Tensor:
    """Write both behind each other: ``[2 N]``."""
    return torch.cat((gate, normed)).view(-1)


def _gate_and_normed(x: Tensor, gate: Tensor, rstd: Tensor, kind: NormGate) -> Tensor:
    """Write the gate and the normed x, without its weight, behind each other: ``[2 N]`` in float32."""
    both = torch.empty((2, *x.shape), dtype=torch.float32, device=x.device)
    gate_part, normed = kind.ordered(*both.unbind())
    gate_part.copy_(gate)
    torch.mul(x, rstd, out=normed)
    return both.view(-1)


def _gated_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: NormGate) -> Tensor:
    return (unchecked_rms_norm(x.float(), weight.float(), eps) * kind.activation(gate.float())).to(x.dtype)


def _is_fused(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Tell whether operators take both side by side.

    ``npu_swiglu_backward`` takes halves of a multiple of 64 bytes: CANN, aclnnSwiGluGrad. In float32 nothing is cast,
    and steps by themselves move no more than these do.
    """
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and gate.shape == x.shape
        and gate.is_floating_point()
        and x.numel() % 32 == 0
        and is_rms_norm_fused(x, None)
        and gate.device == weight.device == x.device
        and weight.shape == x.shape[-1:]
        and not is_distributed(x, gate, weight)
    )
