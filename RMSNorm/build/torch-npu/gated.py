"""A norm, and a gate behind it: of 16 bits as one node that keeps its arguments alone, in float32 up to the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .derivatives import gradients
from .distributed import is_distributed
from .functional import is_fused, norm


class Gate(NamedTuple):
    """Says what a gate goes through, and which operators multiply it with a vector behind or before it.

    Attributes:
        activation: the function of the gate.
        product: takes both, one behind the other, ``[2 N]``.
        gradient: takes the gradient of that, and both.
        is_first: whether the gate comes first in both.
    """

    activation: Callable[[Tensor], Tensor]
    product: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    is_first: bool

    def ordered(self, gate: Any, other: Any) -> tuple[Any, Any]:
        """Return both in their order; what is in that order comes back as gate and other."""
        return (gate, other) if self.is_first else (other, gate)


_SILU = Gate(
    F.silu,
    lambda both: torch.ops.npu.npu_swiglu(both, -1),
    lambda grad, both: torch.ops.npu.npu_swiglu_backward(grad, both, -1),
    is_first=True,
)
_SIGMOID = Gate(
    torch.sigmoid,
    lambda both: F.glu(both, -1),
    lambda grad, both: torch.ops.aten.glu_backward(grad, both, -1),
    is_first=False,
)
GATES = {"silu": _SILU, "swish": _SILU, "sigmoid": _SIGMOID}


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: Gate) -> Tensor:
    """Compute ``(weight * x_normed * activation(gate)).to(x.dtype)`` in float32.

    Args:
        x: ``[..., H]``, of a floating dtype.
        gate: likewise.
        weight: ``[H]``.
        eps: added to the mean.
        kind: says which activation.
    """
    if _is_one_node(x, gate, weight):
        return _GatedNorm.apply(x, gate, weight, eps, kind)
    return _in_steps(x, gate, weight, eps, kind)


class _GatedNorm(torch.autograd.Function):
    """Computes ``weight`` times the product of two halves of one tensor: the normed x and the gate.

    A second derivative goes through :func:`_in_steps`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: Gate) -> Tensor:
        ones = torch.ones(x.shape[-1], dtype=x.dtype, device=x.device)
        rstd = torch.ops.npu.npu_rms_norm(x, ones, eps)[1]
        ctx.save_for_backward(x, gate, weight, rstd)
        ctx.eps, ctx.kind = eps, kind
        product = kind.product(_side_by_side(x, gate, rstd, kind)).view(x.shape)
        return torch.mul(product, weight.float(), out=torch.empty(x.shape, dtype=x.dtype, device=x.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight, rstd = ctx.saved_tensors
        kind, needs = ctx.kind, ctx.needs_input_grad
        if torch.is_grad_enabled():

            def function(*tensors: Tensor) -> Tensor:
                return _in_steps(*tensors, ctx.eps, kind)

            return *gradients(function, (x, gate, weight), needs[:3], grad), None, None
        both = _side_by_side(x, gate, rstd, kind)
        of_both = kind.gradient(grad.float().flatten(), both)
        of_gate, of_normed = (half.view(x.shape) for half in kind.ordered(*of_both.chunk(2)))
        normed = kind.ordered(*both.chunk(2))[1].view(x.shape)
        wide = weight.float()
        grad_gate = torch.mul(of_gate, wide, out=torch.empty(x.shape, dtype=gate.dtype, device=x.device))
        # the normed x has a root mean square of one
        along, grad_weight = torch.ops.npu.npu_rms_norm_backward(of_normed, normed, wide, torch.ones_like(rstd))
        grad_x = torch.mul(along, rstd, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
        return grad_x, grad_gate, grad_weight.to(weight.dtype), None, None


def _side_by_side(x: Tensor, gate: Tensor, rstd: Tensor, kind: Gate) -> Tensor:
    """Write the gate and the normed x, without its weight, behind each other: ``[2 N]`` in float32."""
    both = torch.empty(2 * x.numel(), dtype=torch.float32, device=x.device)
    first, second = kind.ordered(*both.chunk(2))
    first.view(x.shape).copy_(gate)
    torch.mul(x, rstd, out=second.view(x.shape))
    return both


def _in_steps(x: Tensor, gate: Tensor, weight: Tensor, eps: float, kind: Gate) -> Tensor:
    return (norm(x.float(), weight.float(), eps) * kind.activation(gate.float())).to(x.dtype)


def _is_one_node(x: Tensor, gate: Tensor, weight: Tensor) -> bool:
    """Tell whether operators take both, and a node of ours is legal.

    ``npu_swiglu_backward`` takes halves of a multiple of 64 bytes: CANN, aclnnSwiGluGrad. In float32 nothing is cast,
    and steps by themselves move no more than these do.
    """
    return (
        x.dtype in (torch.float16, torch.bfloat16)
        and gate.shape == x.shape
        and gate.is_floating_point()
        and x.numel() % 16 == 0
        and is_fused(x, None)
        and gate.device == weight.device == x.device
        and weight.shape == x.shape[-1:]
        and not torch.compiler.is_compiling()
        and not is_distributed(x, gate, weight)
    )
