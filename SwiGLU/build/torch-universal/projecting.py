"""One product with two weights that are neighbours, differentiable as often as one likes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .neighbours import as_one, joined


def project_with(x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> Tensor:
    """Multiply with two weights ``[I, H]`` at once, and add their biases: ``[..., H]`` to ``[..., 2·I]``.

    Weights are neighbours, and so are biases. Autocast casts all of them, as it does for ``F.linear``.
    """
    if torch.is_grad_enabled() and (
        x.requires_grad or gate.requires_grad or up.requires_grad or _any(gate_bias, up_bias)
    ):
        if torch.is_autocast_enabled("npu"):
            x = x.to(torch.get_autocast_dtype("npu"))
        return _Projected.apply(x, gate, up, gate_bias, up_bias)
    return F.linear(x, as_one(gate, up), None if gate_bias is None else as_one(gate_bias, up_bias))


def _any(gate_bias: Tensor | None, up_bias: Tensor | None) -> bool:
    """Tell whether one of two biases needs a gradient."""
    return gate_bias is not None and (gate_bias.requires_grad or up_bias.requires_grad)


class _Projected(torch.autograd.Function):
    """Keeps the two weights themselves, so that autograd sees what is changed in them, and what they were cast to.

    The gradient of both is one product, of which each gets a view.
    """

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> Tensor:
        weight, bias = as_one(gate, up), None if gate_bias is None else as_one(gate_bias, up_bias)
        cast = None
        if weight.dtype is not x.dtype and torch.is_autocast_enabled("npu"):
            weight = cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast, gate, up)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, cast, gate, up = ctx.saved_tensors
        needs_x, needs_gate, needs_up, *needs_biases = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        d_x = d_gate = d_up = d_gate_bias = d_up_bias = None
        if needs_x:
            if torch.is_grad_enabled():  # this gradient is differentiated in its turn
                cast = torch.cat((gate, up)).to(x.dtype)
            d_x = grad @ (joined(gate, up) if cast is None else cast)
        if needs_gate or needs_up:
            d_gate, d_up = (rows.t() @ x.reshape(-1, x.shape[-1])).to(gate.dtype).chunk(2)
        if any(needs_biases):
            d_gate_bias, d_up_bias = rows.sum(0).to(gate.dtype).chunk(2)
        return d_x, d_gate, d_up, d_gate_bias, d_up_bias
