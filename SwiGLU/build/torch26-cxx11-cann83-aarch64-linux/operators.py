"""Operators of torch_npu whose gradient is missing or broken, with a gradient of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_NAMESPACE = __name__.partition(".")[0]
_TANH, _ACTIVATE_LEFT = 1, True  # torch_npu's defaults are tanh and the right half


# npu_geglu has a derivative, but the meta kernel of npu_geglu_grad raises in every release up to 2.14, so that it fails
# under torch.compile and with fake tensors. An operator around it has a meta kernel that works.
@torch.library.custom_op(f"{_NAMESPACE}::geglu_grad", mutates_args=())
def _geglu_grad(grad: Tensor, x: Tensor, gelu: Tensor) -> Tensor:
    return torch.ops.npu.npu_geglu_grad(grad, x, gelu, -1, _TANH, _ACTIVATE_LEFT)


@_geglu_grad.register_fake
def _(grad: Tensor, x: Tensor, gelu: Tensor) -> Tensor:
    return torch.empty_like(x)


class GatedUnit(NamedTuple):
    """A gated linear unit of ``[..., 2·I]``.

    Attributes:
        forward: its value, and what ``backward`` wants besides.
        backward: the gradient from that of the value, the input, and the rest of what ``forward`` gave.
        backward_wants_forward: whether there is such a rest.
    """

    forward: Callable[[Tensor], tuple[Tensor, ...]]
    backward: Callable[..., Tensor]
    backward_wants_forward: bool


SWIGLU = GatedUnit(
    lambda x: (torch.ops.npu.npu_swiglu(x, -1),),
    lambda grad, x: torch.ops.npu.npu_swiglu_backward(grad, x, -1),
    backward_wants_forward=False,
)
GEGLU = GatedUnit(
    lambda x: torch.ops.npu.npu_geglu(x, -1, _TANH, _ACTIVATE_LEFT), _geglu_grad, backward_wants_forward=True
)


class _GeGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y, gelu = GEGLU.forward(x)
        ctx.save_for_backward(x, gelu)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return GEGLU.backward(grad.contiguous(), *ctx.saved_tensors)


def geglu_fused(x: Tensor) -> Tensor:
    """``gelu_tanh(x[..., :I]) * x[..., I:]`` in one launch."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _GeGLU.apply(x)
    return GEGLU.forward(x)[0]


def has_clipped_swiglu() -> bool:
    """Absent from torch_npu 2.6.0, 2.7.1 and 2.8.0."""
    return hasattr(torch.ops.npu, "npu_clipped_swiglu")


class _ClippedSwiGLU(torch.autograd.Function):
    """``npu_clipped_swiglu`` has no derivative, and says nothing when one is asked for."""

    @staticmethod
    def forward(ctx, x: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.options = alpha, limit, interleaved
        return _clipped_swiglu(x, alpha, limit, interleaved)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (x,), (alpha, limit, interleaved) = ctx.saved_tensors, ctx.options
        halves = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
        gate, up, grad = (tensor.float() for tensor in (*halves, grad))
        clipped = gate.clamp(max=limit)
        sigmoid = torch.sigmoid(alpha * clipped)
        slope = sigmoid * (1 + alpha * clipped * (1 - sigmoid)) * (gate <= limit)
        d_gate = grad * (up.clamp(-limit, limit) + 1) * slope
        d_up = grad * clipped * sigmoid * (up.abs() <= limit)
        d_x = torch.stack((d_gate, d_up), -1).flatten(-2) if interleaved else torch.cat((d_gate, d_up), -1)
        return d_x.to(x.dtype), None, None, None


def clipped_swiglu_fused(x: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    """The clipped SwiGLU of ``x`` in one launch."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _ClippedSwiGLU.apply(x, alpha, limit, interleaved)
    return _clipped_swiglu(x, alpha, limit, interleaved)


def _clipped_swiglu(x: Tensor, alpha: float, limit: float, interleaved: bool) -> Tensor:
    return torch.ops.npu.npu_clipped_swiglu(
        x, group_index=None, dim=-1, alpha=alpha, limit=limit, bias=1.0, interleaved=interleaved
    )
