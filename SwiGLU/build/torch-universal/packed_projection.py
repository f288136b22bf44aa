"""One product with two weights that are neighbours, differentiable as often as one likes."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._common.adjacent_storage import joined, with_neighbour


def project(gate: nn.Module, up: nn.Module, x: Tensor) -> Tensor:
    """Multiply with the weights of two packed layers at once, and add their biases. Differentiable.

    Autocast casts what it casts for ``F.linear``.

    Args:
        gate: a linear layer ``[H] -> [I]``.
        up: another one. Of both :func:`.packing.separate` has to say None, which is not looked at here.
        x: ``[..., H]``, of the dtype of the weights.

    Returns:
        ``[..., 2·I]``, the gate first.
    """
    a, b = gate._parameters, up._parameters
    weights, biases = (a["weight"], b["weight"]), (a["bias"], b["bias"])
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *weights, *biases)):
        if torch.is_autocast_enabled("npu"):
            x = x.to(torch.get_autocast_dtype("npu"))
        return _Projected.apply(x, *weights, *biases)
    return F.linear(x, with_neighbour(weights[0]), None if biases[0] is None else with_neighbour(biases[0]))


class _Projected(torch.autograd.Function):
    """Keeps the two weights themselves, so that autograd sees what is changed in them, and what they were cast to.

    The gradient of both is one product, of which each gets a view.
    """

    @staticmethod
    def forward(ctx, x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None) -> Tensor:
        weight, bias = with_neighbour(gate), None if gate_bias is None else with_neighbour(gate_bias)
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
