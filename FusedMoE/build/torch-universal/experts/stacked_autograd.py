"""All experts of a module, whose weights are stacked in one tensor each, as one node of autograd that keeps little.

Node by node the gradient would keep, for each choice of each token, the token, the product of gate and up, what the
gate makes of it, and the expert's result. Kept are the product and, where the routing weights need a gradient, the
result: each costs a product with all weights to compute again. Tokens are permuted and the gate is computed again, a
launch each that reads no weight; but not for the experts that ran last, whose gradient comes first, when nothing else
has grown yet.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from .._common.derivatives import by_formula, gradients
from .._common.last_forward import Latest
from ..expert_activation import Gate
from ..ops import permutation
from ..ops.gmm import bias_gradient, multiply, weight_gradient
from ..ops.reference import experts_in_torch


def stacked_experts(
    gate: Gate,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    is_partial: bool,
) -> Tensor:
    """Compute what :class:`StackedExpertsFunction` does of the same arguments, without a gradient."""
    rows, order = permutation.permute(hidden_states, top_k_index)
    counts = permutation.tokens_per_expert(top_k_index, down.shape[0])
    tail = permutation.tail_mask(counts, rows.shape[0]) if is_partial else None
    rows = gate.forward(multiply(rows, gate_up, counts, gate_up_bias, tail))
    return permutation.unpermute(multiply(rows, down, counts, down_bias, tail), order, top_k_weights)


class StackedExpertsFunction(torch.autograd.Function):
    """Computes :func:`fused_moe.fused_experts` of what the operators take, with a gate and without a norm behind it.

    Weights are ``[E, K, N]``: transposed views where they are stored as ``[E, N, K]``. ``is_partial`` says that some
    choices go to experts which live elsewhere.
    """

    @staticmethod
    def forward(
        ctx,
        gate: Gate,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None,
        down_bias: Tensor | None,
        is_partial: bool,
    ) -> Tensor:
        rows, order = permutation.permute(hidden_states, top_k_index)
        counts = permutation.tokens_per_expert(top_k_index, down.shape[0])
        tail = permutation.tail_mask(counts, rows.shape[0]) if is_partial else None
        needs_weights, needs_gate_up, needs_down = ctx.needs_input_grad[3:6]
        product = multiply(rows, gate_up, counts, gate_up_bias, tail)
        rows = rows if needs_gate_up else None
        activated = gate.forward(product)
        result = multiply(activated, down, counts, down_bias, tail)
        ctx.gate = gate
        # a compiler decides for itself what to keep, and cannot trace an object that outlives the forward
        compiling = torch.compiler.is_compiling()
        ctx.latest = None if compiling else Latest((rows, activated if needs_down else None))
        kept = result if needs_weights else None
        ctx.save_for_backward(
            hidden_states, top_k_index, top_k_weights, gate_up, down, gate_up_bias, down_bias, order, counts, tail,
            product, kept,
        )  # fmt: skip
        return permutation.unpermute(result, order, top_k_weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, index, weights, gate_up, down, gate_up_bias, down_bias, order, counts, tail, product, kept = (
            ctx.saved_tensors
        )
        if by_formula(grad):
            inputs = x, index, weights, gate_up, down, gate_up_bias, down_bias
            function = partial(experts_in_torch, activation=ctx.gate, post_expert_norm=None)
            return None, *gradients(function, inputs, ctx.needs_input_grad[1:8], grad), None
        _, needs_x, _, needs_weights, needs_gate_up, needs_down, needs_gate_up_bias, needs_down_bias, _ = (
            ctx.needs_input_grad
        )
        grad = grad.contiguous()
        rows, activated = (() if ctx.latest is None else ctx.latest.take()) or (None, None)  # no name holds both
        if kept is None:  # without a gradient for the weights any rows will do
            kept = rows = permutation.permute(x, index)[0] if rows is None else rows
        d_result, d_weights = permutation.unpermute_gradient(grad, kept, order, weights, index)
        del kept
        d_down = None
        if needs_down:
            activated = ctx.gate.forward(product) if activated is None else activated
            d_down = weight_gradient(activated, d_result, counts, down)
        del activated
        d_down_bias = bias_gradient(d_result, counts, down_bias) if needs_down_bias else None
        d_x = d_gate_up = d_gate_up_bias = None
        if needs_x or needs_gate_up or needs_gate_up_bias:
            d_activated = multiply(d_result, down.mT, counts, tail=tail)
            del d_result
            d_product = ctx.gate.backward(d_activated, product)
            del d_activated
            if needs_gate_up:
                rows = permutation.permute(x, index)[0] if rows is None else rows
                d_gate_up = weight_gradient(rows, d_product, counts, gate_up)
            del rows
            if needs_gate_up_bias:
                d_gate_up_bias = bias_gradient(d_product, counts, gate_up_bias)
            if needs_x:
                d_rows = multiply(d_product, gate_up.mT, counts, tail=tail)
                del d_product
                d_x = permutation.permute_gradient(d_rows, x, index, order)
        d_weights = d_weights if needs_weights else None
        return None, d_x, None, d_weights, d_gate_up, d_down, d_gate_up_bias, d_down_bias, None
