"""Operators of torch_npu whose gradient is missing or broken, with a gradient of ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._common.clipped import (
    clipped_swiglu_gradient,
    clipped_swiglu_in_torch,
    geglu_grad,
    has_clipped_swiglu,
    launch_clipped_swiglu,
)
from ._common.derivatives import by_formula, gradients
from ._common.second_order import let_differentiate

_ERF, _BY_TANH = 0, 1
NO_LIMIT = torch.finfo(torch.float32).max  # of the clipped SwiGLU


class GatedUnit(NamedTuple):
    """Holds the operators of a gated linear unit, which takes gate and up as ``[..., 2·I]`` and gives ``[..., I]``.

    Attributes:
        launch: computes the value in one launch, differentiable.
        forward: computes the value, and what ``backward`` wants besides, without a gradient.
        backward: computes the gradient from that of the value, the input, and the rest of what ``forward`` gave.
        backward_wants_forward: whether there is such a rest.
        wants_alignment: whether ``backward`` takes no halves but those of a multiple of 64 bytes.
        activation: what the gate goes through before it is multiplied with up.
        recognised: classes of activations, formulas of torch's GELU, or forwards of one object, each with the forward
            by which it has the values of ``activation``, or None.
        gate_is_last: whether the gate is the second half, not the first.
    """

    launch: Callable[[Tensor], Tensor]
    forward: Callable[[Tensor], tuple[Tensor, ...]]
    backward: Callable[..., Tensor]
    backward_wants_forward: bool
    wants_alignment: bool
    activation: Callable[[Tensor], Tensor]
    recognised: dict[type | str | Callable, Callable | None]
    gate_is_last: bool = False

    def halves(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate and up of ``[..., 2·I]``."""
        first, second = x.chunk(2, -1)
        return (second, first) if self.gate_is_last else (first, second)

    def in_torch(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute the value of gate and up, ``[..., I]`` each, differentiable as often as one likes."""
        return self.activation(gate) * up


def _launch_swiglu(gate_up: Tensor) -> Tensor:
    return torch.ops.npu.npu_swiglu(gate_up, -1)


class _GeGLU(torch.autograd.Function):
    """Launches ``npu_geglu``, and for its gradient the operator that has a meta kernel which works."""

    @staticmethod
    def forward(ctx, x: Tensor, unit: GatedUnit) -> Tensor:
        y, gelu = unit.forward(x)
        ctx.save_for_backward(x, gelu)
        ctx.unit = unit
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None]:
        x, gelu = ctx.saved_tensors
        unit = ctx.unit
        if by_formula(grad):
            return gradients(lambda x: unit.in_torch(*unit.halves(x.float())), (x,), (True,), grad)[0], None
        return unit.backward(grad.contiguous(), x, gelu), None


def _geglu(approximate: int, activation: Callable[[Tensor], Tensor], gate_is_last: bool = False) -> GatedUnit:
    """Return the unit of a GELU, whose operator activates either half."""

    def launch(x: Tensor) -> Tensor:
        is_trained = torch.is_grad_enabled() and x.requires_grad
        return _GeGLU.apply(x, unit) if is_trained else unit.forward(x)[0]

    unit = GatedUnit(
        launch,
        lambda x: torch.ops.npu.npu_geglu(x, -1, approximate, not gate_is_last),
        lambda grad, x, gelu: geglu_grad(grad, x, gelu, approximate, not gate_is_last),
        backward_wants_forward=True,
        wants_alignment=False,
        activation=activation,
        recognised={},
        gate_is_last=gate_is_last,
    )
    return unit


SWIGLU = GatedUnit(
    _launch_swiglu,
    lambda x: (torch.ops.npu.npu_swiglu(x, -1),),
    lambda grad, x: torch.ops.npu.npu_swiglu_backward(grad, x, -1),
    backward_wants_forward=False,
    wants_alignment=True,
    activation=F.silu,
    recognised={nn.SiLU: nn.SiLU.forward},
)
_GELU_TANH = partial(F.gelu, approximate="tanh")
GEGLU, EXACT_GEGLU = _geglu(_BY_TANH, _GELU_TANH), _geglu(_ERF, F.gelu)
GEGLU_GATE_LAST, EXACT_GEGLU_GATE_LAST = _geglu(_BY_TANH, _GELU_TANH, True), _geglu(_ERF, F.gelu, True)


def register_derivative_of_swiglu() -> None:
    """Let the gradient of ``npu_swiglu`` be differentiated, where torch_npu is there."""
    if hasattr(torch.ops.npu, "npu_swiglu_backward"):
        let_differentiate(torch.ops.npu.npu_swiglu_backward.default, 0, _swiglu_gradient_in_torch)


def _swiglu_gradient_in_torch(grad: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    """Compute what ``npu_swiglu_backward`` does."""
    found = gradients(lambda x: SWIGLU.in_torch(*x.float().chunk(2, dim)), (x,), (True,), grad)
    return found[0]  # type: ignore[return-value]


class _ClippedSwiGLU(torch.autograd.Function):
    """Launches the clipped SwiGLU, whose operator has no derivative, and keeps its argument."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, *options: float | bool) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.options = options
        return _launch_clipped(gate_up, *options)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gate_up,) = ctx.saved_tensors
        alpha, limit, *_ = ctx.options
        if by_formula(grad):
            found = gradients(lambda x: clipped_swiglu_in_torch(x.float(), *ctx.options), (gate_up,), (True,), grad)[0]
        elif limit > 1e38:  # NO_LIMIT, by a number that has no name: a compiler would take that for an input
            found = _scaled_gradient(grad, gate_up, alpha)
        else:
            found = clipped_swiglu_gradient(grad, gate_up, *ctx.options)
        return found, None, None, None, None


def clipped_swiglu_fused(
    gate_up: Tensor, alpha: float, limit: float, offset: float = 0.0, interleaved: bool = False
) -> Tensor:
    """Compute the clipped SwiGLU in one launch, differentiable: ``[..., 2·I]`` to ``[..., I]``.

    With an ``alpha`` of 1 it is the SwiGLU of DeepSeek-V4, which every release of torch_npu has operators for.
    """
    if torch.compiler.is_compiling():  # a graph of any sizes would take any numbers, too, which the operator does not
        from torch.fx.experimental.symbolic_shapes import guard_scalar

        alpha, limit, offset = guard_scalar(alpha), guard_scalar(limit), guard_scalar(offset)
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _ClippedSwiGLU.apply(gate_up, alpha, limit, offset, interleaved)
    return _launch_clipped(gate_up, alpha, limit, offset, interleaved)


def _launch_clipped(gate_up: Tensor, alpha: float, limit: float, offset: float, interleaved: bool) -> Tensor:
    """Launch ``npu_clipped_swiglu``, or in releases without it ``npu_swiglu`` of what is clamped before."""
    if has_clipped_swiglu():
        return launch_clipped_swiglu(gate_up, alpha, limit, offset, interleaved)
    assert (alpha, offset, interleaved) == (1, 0, False)
    clamped = gate_up.clamp(max=limit)
    clamped[..., clamped.shape[-1] // 2 :].clamp_(min=-limit)
    return torch.ops.npu.npu_swiglu(clamped, -1)


def _scaled_gradient(grad: Tensor, gate_up: Tensor, factor: float) -> Tensor:
    """Return the gradient of ``gate · sigmoid(factor · gate) · up``: that of SwiGLU of a scaled gate, divided again."""
    scaled, half = gate_up.clone(), gate_up.shape[-1] // 2
    scaled[..., :half].mul_(factor)
    found = torch.ops.npu.npu_swiglu_backward(grad.contiguous(), scaled, -1)
    found[..., half:].div_(factor)
    return found
