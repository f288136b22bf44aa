"""Operators of torch_npu whose gradient is missing or broken, with a gradient of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._common.clipped import clipped_swiglu_gradient, clipped_swiglu_in_torch, launch_clipped_swiglu
from ._common.derivatives import by_formula, gradients
from ._common.second_order import let_differentiate

_NAMESPACE = __name__.partition(".")[0]
_ERF = 0
_TANH, _ACTIVATE_LEFT = 1, True  # torch_npu's defaults are tanh and the right half


# npu_geglu has a derivative, but the meta kernel of npu_geglu_grad raises in every release up to 2.14, so that it fails
# under torch.compile and with fake tensors. An operator around it has a meta kernel that works.
@torch.library.custom_op(f"{_NAMESPACE}::geglu_grad", mutates_args=())
def _geglu_grad(grad: Tensor, x: Tensor, gelu: Tensor, approximate: int) -> Tensor:
    return torch.ops.npu.npu_geglu_grad(grad, x, gelu, -1, approximate, _ACTIVATE_LEFT)


@_geglu_grad.register_fake
def _(grad: Tensor, x: Tensor, gelu: Tensor, approximate: int) -> Tensor:
    return torch.empty_like(x)


class GatedUnit(NamedTuple):
    """Holds the operators of a gated linear unit, which takes ``[..., 2·I]`` and gives ``[..., I]``.

    Attributes:
        forward: computes the value, and what ``backward`` wants besides.
        backward: computes the gradient from that of the value, the input, and the rest of what ``forward`` gave.
        backward_wants_forward: whether there is such a rest.
        activation: what the gate goes through before it is multiplied with up.
        activations: the classes that were met, formulas of torch's GELU, or forwards of one object, each with the
            forward by which it computes that, or None.
    """

    forward: Callable[[Tensor], tuple[Tensor, ...]]
    backward: Callable[..., Tensor]
    backward_wants_forward: bool
    activation: Callable[[Tensor], Tensor]
    activations: dict[type | str | Callable, Callable | None]

    def in_torch(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute the value of gate and up, ``[..., I]`` each, differentiable as often as one likes."""
        return self.activation(gate) * up


SWIGLU = GatedUnit(
    lambda x: (torch.ops.npu.npu_swiglu(x, -1),),
    lambda grad, x: torch.ops.npu.npu_swiglu_backward(grad, x, -1),
    backward_wants_forward=False,
    activation=F.silu,
    activations={nn.SiLU: nn.SiLU.forward},
)
GEGLU = GatedUnit(
    lambda x: torch.ops.npu.npu_geglu(x, -1, _TANH, _ACTIVATE_LEFT),
    lambda grad, x, gelu: _geglu_grad(grad, x, gelu, _TANH),
    backward_wants_forward=True,
    activation=partial(F.gelu, approximate="tanh"),
    activations={},
)
EXACT_GEGLU = GatedUnit(
    lambda x: torch.ops.npu.npu_geglu(x, -1, _ERF, _ACTIVATE_LEFT),
    lambda grad, x, gelu: _geglu_grad(grad, x, gelu, _ERF),
    backward_wants_forward=True,
    activation=F.gelu,
    activations={},
)


def register_derivative_of_swiglu() -> None:
    """Let the gradient of ``npu_swiglu`` be differentiated, where torch_npu is there."""
    if hasattr(torch.ops.npu, "npu_swiglu_backward"):
        let_differentiate(torch.ops.npu.npu_swiglu_backward.default, 0, _swiglu_gradient_in_torch)


def _swiglu_gradient_in_torch(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Compute what ``npu_swiglu_backward`` does."""

    def swiglu(x: Tensor) -> Tensor:
        gate, up = x.float().chunk(2, dim)
        return F.silu(gate) * up

    return gradients(swiglu, (x,), (True,), grad)[0]  # type: ignore[return-value]


class _GeGLU(torch.autograd.Function):
    """Launches ``npu_geglu``, and for its gradient the operator that has a meta kernel which works."""

    @staticmethod
    def forward(ctx, x: Tensor, is_exact: bool) -> Tensor:
        y, gelu = (EXACT_GEGLU if is_exact else GEGLU).forward(x)
        ctx.save_for_backward(x, gelu)
        ctx.is_exact = is_exact
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None]:
        x, gelu = ctx.saved_tensors
        unit = EXACT_GEGLU if ctx.is_exact else GEGLU
        if by_formula(grad):
            return gradients(lambda x: unit.in_torch(*x.float().chunk(2, -1)), (x,), (True,), grad)[0], None
        return unit.backward(grad.contiguous(), x, gelu), None


def geglu_fused(x: Tensor, is_exact: bool = False) -> Tensor:
    """Compute ``gelu(x[..., :I]) * x[..., I:]`` in one launch, differentiable: ``[..., 2·I]`` to ``[..., I]``."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _GeGLU.apply(x, is_exact)
    return (EXACT_GEGLU if is_exact else GEGLU).forward(x)[0]


class _ClippedSwiGLU(torch.autograd.Function):
    """Launches the clipped SwiGLU, whose operator has no derivative."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, *options: float | bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.options = options
        return launch_clipped_swiglu(gate_up, *options)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        if by_formula(grad):
            found = gradients(lambda x: clipped_swiglu_in_torch(x.float(), *ctx.options), (gate_up,), (True,), grad)[0]
            return found, None, None, None, None
        return clipped_swiglu_gradient(grad, gate_up, *ctx.options), None, None, None, None


def clipped_swiglu_fused(gate_up: Tensor, alpha: float, limit: float, offset: float, interleaved: bool) -> Tensor:
    """Compute the clipped SwiGLU in one launch, differentiable: ``[..., 2·I]`` to ``[..., I]``."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _ClippedSwiGLU.apply(gate_up, alpha, limit, offset, interleaved)
    return launch_clipped_swiglu(gate_up, alpha, limit, offset, interleaved)
