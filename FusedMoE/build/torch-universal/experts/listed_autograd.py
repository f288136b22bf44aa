"""All experts of a list of modules as one node of autograd. What it keeps, and why, stacked_autograd.py says."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .._common.derivatives import by_formula, gradients
from .._common.last_forward import Latest
from ..expert_activation import SWIGLU
from ..ops import hybrid_gmm, permutation
from ..ops.reference import experts_in_torch


class ListedExpertsFunction(torch.autograd.Function):
    """Computes SwiGLU experts whose gate and up lie side by side.

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
        rows, order = permutation.permute(hidden_states, top_k_index)
        counts = permutation.tokens_per_expert(top_k_index, number)
        needs_gate_up, needs_down = (any(ctx.needs_input_grad[5:][part]) for part in _parts(ctx.split))
        product = hybrid_gmm.multiply(rows, counts, None, has_bias[0], gate_up)
        rows = rows if needs_gate_up else None
        activated = SWIGLU.forward(product)
        result = hybrid_gmm.multiply(activated, counts, None, has_bias[1], down)
        ctx.latest = Latest((rows, activated if needs_down else None))
        kept = result if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(hidden_states, top_k_index, top_k_weights, order, counts, product, kept, *parameters)
        return permutation.unpermute(result, order, top_k_weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, index, weights, order, counts, product, kept, *parameters = ctx.saved_tensors
        needs_x, _, needs_weights, _, _, *needs = ctx.needs_input_grad
        if by_formula(grad):
            inputs, wanted = (x, index, weights, *parameters), (needs_x, False, needs_weights, *needs)
            function = partial(_in_torch, counts.shape[0], ctx.has_bias)
            d_x, _, d_weights, *others = gradients(function, inputs, wanted, grad)
            return d_x, None, d_weights, None, None, *others
        gate_up, down = (parameters[part] for part in _parts(ctx.split))
        needs_gate_up, needs_down = (needs[part] for part in _parts(ctx.split))
        rows, activated = ctx.latest.take() or (None, None)
        if kept is None:  # without a gradient for the weights any rows will do
            kept = rows = permutation.permute(x, index)[0] if rows is None else rows
        d_result, d_weights = permutation.unpermute_gradient(grad.contiguous(), kept, order, weights, index)
        del kept
        d_down: list[Tensor | None] = [None] * len(down)
        if any(needs_down):
            activated = SWIGLU.forward(product) if activated is None else activated
            d_down = hybrid_gmm.parameter_gradients(activated, d_result, counts, ctx.has_bias[1], down, needs_down)
        del activated
        d_x: Tensor | None = None
        d_gate_up: list[Tensor | None] = [None] * len(gate_up)
        if needs_x or any(needs_gate_up):
            d_activated = hybrid_gmm.input_gradient(d_result, counts, None, ctx.has_bias[1], down)
            del d_result
            d_product = SWIGLU.backward(d_activated, product)
            del d_activated
            if any(needs_gate_up):
                rows = permutation.permute(x, index)[0] if rows is None else rows
                d_gate_up = hybrid_gmm.parameter_gradients(
                    rows, d_product, counts, ctx.has_bias[0], gate_up, needs_gate_up
                )
            del rows
            if needs_x:
                d_rows = hybrid_gmm.input_gradient(d_product, counts, None, ctx.has_bias[0], gate_up)
                del d_product
                d_x = permutation.permute_gradient(d_rows, x, index, order)
        return d_x, None, d_weights if needs_weights else None, None, None, *d_gate_up, *d_down


def _in_torch(
    number: int, has_bias: tuple[bool, bool], x: Tensor, index: Tensor, weights: Tensor, *parameters: Tensor
) -> Tensor:
    """Compute what :class:`ListedExpertsFunction` does with operators of torch."""
    both, down = (parameters[part] for part in _parts(2 * number * (1 + has_bias[0])))
    gate_up, gate_up_bias = hybrid_gmm.stack_parameters(both, number, has_bias[0])
    last, last_bias = hybrid_gmm.stack_parameters(down, number, has_bias[1])
    return experts_in_torch(x, index, weights, gate_up, last, gate_up_bias, last_bias, SWIGLU, None)


def _parts(split: int) -> tuple[slice, slice]:
    """Tell where the parameters of gate and up are among all, and those of down."""
    return slice(split), slice(split, None)
