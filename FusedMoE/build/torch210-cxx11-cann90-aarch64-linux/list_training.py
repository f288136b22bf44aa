"""All experts of a list as one node of autograd, which keeps what training.py says, for the same reasons."""

from __future__ import annotations

import torch
from torch import Tensor

from . import lists, routing
from .gates import SWIGLU
from .latest import Latest


class ListedExperts(torch.autograd.Function):
    """SwiGLU experts with gate and up side by side.

    ``number`` is that of the experts, ``has_bias`` whether gate and up, and down, have one. ``parameters`` are those of
    HybridGmmFunction for gate and up, and then those for down.
    """

    @staticmethod
    def forward(
        ctx,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        number: int,
        has_bias: tuple[bool, bool],
        *parameters: Tensor,
    ) -> Tensor:
        ctx.has_bias, ctx.split = has_bias, 2 * number * (1 + has_bias[0])
        gate_up, down = (parameters[part] for part in _parts(ctx.split))
        rows, order = routing.permute(hidden_states, top_k_index)
        counts = routing.count(top_k_index, number)
        needs_gate_up, needs_down = (any(ctx.needs_input_grad[5:][part]) for part in _parts(ctx.split))
        product = lists.product(rows, counts, None, has_bias[0], gate_up)
        rows = rows if needs_gate_up else None
        activated = SWIGLU.forward(product)
        result = lists.product(activated, counts, None, has_bias[1], down)
        ctx.latest = Latest((rows, activated if needs_down else None))
        kept = result if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, order, counts, product, kept, *parameters)
        return routing.unpermute(result, order, top_k_weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, index, weights, order, counts, product, kept, *parameters = ctx.saved_tensors
        needs_x, _, needs_weights, _, _, *needs = ctx.needs_input_grad
        gate_up, down = (parameters[part] for part in _parts(ctx.split))
        needs_gate_up, needs_down = (needs[part] for part in _parts(ctx.split))
        rows, activated = ctx.latest.take()
        if kept is None:  # without a gradient for the weights any rows will do
            kept = rows = routing.permute(x, index)[0] if rows is None else rows
        d_result, d_weights = routing.unpermute_gradient(grad.contiguous(), kept, order, weights, index)
        del kept
        d_down: list[Tensor | None] = [None] * len(down)
        if any(needs_down):
            activated = SWIGLU.forward(product) if activated is None else activated
            d_down = lists.parameter_gradients(activated, d_result, counts, ctx.has_bias[1], down, needs_down)
        del activated
        d_x: Tensor | None = None
        d_gate_up: list[Tensor | None] = [None] * len(gate_up)
        if needs_x or any(needs_gate_up):
            d_activated = lists.input_gradient(d_result, counts, None, ctx.has_bias[1], down)
            del d_result
            d_product = SWIGLU.backward(d_activated, product)
            del d_activated
            if any(needs_gate_up):
                rows = routing.permute(x, index)[0] if rows is None else rows
                d_gate_up = lists.parameter_gradients(rows, d_product, counts, ctx.has_bias[0], gate_up, needs_gate_up)
            del rows
            if needs_x:
                d_rows = lists.input_gradient(d_product, counts, None, ctx.has_bias[0], gate_up)
                del d_product
                d_x = routing.permute_gradient(d_rows, x, index, order)
        return d_x, None, d_weights if needs_weights else None, None, None, *d_gate_up, *d_down


def _parts(split: int) -> tuple[slice, slice]:
    """Of the parameters: gate and up, and down."""
    return slice(split), slice(split, None)
