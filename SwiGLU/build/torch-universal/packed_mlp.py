"""A packed MLP as one node of autograd.

Node by node an MLP keeps the product of gate and up, and what the unit makes of it for the gradient of the down
projection: SwiGLU three times its inner size a token, GeGLU four times. One node keeps the product and computes the
rest again, but for the MLP that ran last: its gradient comes first, when nothing else has grown yet. Weight gradients
come out contiguous, so that autograd takes them as they are instead of copying them. Whoever differentiates a gradient
gets that of the same formula, node by node.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._common.adjacent_storage import joined, with_neighbour
from ._common.derivatives import gradients
from ._common.last_forward import Latest
from .functional import is_aligned, is_fused_dtype
from .operators import GatedUnit
from .packing import unfit


def trains_as_one_node(gate: nn.Module, up: nn.Module, down: nn.Module, x: Tensor) -> bool:
    """Tell whether an MLP can be one node: plain layers of one dtype on the NPU that need a gradient.

    That gate and up are packed, and that gradients are enabled, is not looked at here.
    """
    if unfit(down) is not None:
        return False
    a, b, c, dtype = gate._parameters["weight"], up._parameters["weight"], down._parameters["weight"], x.dtype
    return (
        (x.requires_grad or a.requires_grad or b.requires_grad or c.requires_grad)
        and dtype is a.dtype is c.dtype
        and is_fused_dtype(dtype)
        and x.numel() > 0
        and is_aligned(a.shape[0], dtype)
        and a.shape[0] == c.shape[1]
        and x.device == c.device
        and x.device.type == "npu"
        and not torch.is_autocast_enabled("npu")
    )


class PackedMLP(torch.autograd.Function):
    """Computes ``down(unit(x @ [gate; up]ᵀ))``.

    ``apply(unit, x, gate, up, down, gate_bias, up_bias, down_bias)`` takes ``x`` ``[..., H]``, packed weights
    ``[I, H]`` of gate and up, one ``[H, I]`` of down, and their biases or None.
    """

    @staticmethod
    def forward(ctx, unit: GatedUnit, x: Tensor, *parameters: Tensor | None) -> Tensor:
        gate, up, down, gate_bias, up_bias, down_bias = parameters
        bias = None if gate_bias is None else with_neighbour(gate_bias)
        product = F.linear(x, with_neighbour(gate), bias)
        computed = unit.forward(product)
        ctx.unit, ctx.computed = unit, Latest(computed)
        ctx.save_for_backward(x, product, gate, up, down)
        ctx.biases = gate_bias, up_bias, down_bias  # the gradient asks whose it is, never for their values
        return F.linear(computed[0], down, down_bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, product, gate, up, down = ctx.saved_tensors
        if torch.is_grad_enabled():
            function = partial(_mlp_in_torch, ctx.unit, product)
            inputs = x, gate, up, down, *ctx.biases
            return None, *gradients(function, inputs, ctx.needs_input_grad[1:], grad)
        _, needs_x, needs_gate, needs_up, needs_down, *needs_biases = ctx.needs_input_grad
        grad, product = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (grad, product))
        known = ctx.computed.take() or (ctx.unit.forward(product) if ctx.unit.backward_wants_forward else ())
        known = tuple(tensor.reshape(product.shape[0], -1) for tensor in known)
        d_down = grad.t() @ known[0] if known and needs_down else None
        known = known[1:]  # what is largest lives one after the other
        d_product = ctx.unit.backward(grad @ down, product, *known)
        d_gate, d_up = (d_product.t() @ x.reshape(-1, x.shape[-1])).chunk(2) if needs_gate or needs_up else (None, None)
        d_gate_bias, d_up_bias = d_product.sum(0).chunk(2) if any(needs_biases[:2]) else (None, None)
        d_down_bias = grad.sum(0) if needs_biases[2] else None
        d_x = (d_product @ joined(gate, up)).view(x.shape) if needs_x else None
        del d_product
        if needs_down and d_down is None:
            d_down = grad.t() @ ctx.unit.forward(product)[0]
        return None, d_x, d_gate, d_up, d_down, d_gate_bias, d_up_bias, d_down_bias


def _mlp_in_torch(unit: GatedUnit, product: Tensor, x: Tensor, *parameters: Tensor | None) -> Tensor:
    """Compute an MLP whose gate and up gave ``product``: a bias may have been changed since."""
    gate, up, down, gate_bias, up_bias, down_bias = parameters
    halves = F.linear(x, gate, gate_bias), F.linear(x, up, up_bias)
    halves = [half + (then - half).detach() for half, then in zip(halves, product.chunk(2, -1))]
    return F.linear(unit.in_torch(*halves), down, down_bias)
