"""A linear layer with adapters as one node of autograd.

Node by node that is the product of the layer, two small ones, a scale and an addition of the size of the output for
each adapter; backward has the scale again, and a copy of each weight gradient. Here the scale is applied to what the
first small product gives, and so neither to an output nor to its gradient. Kept are the input of each adapter, once,
and what its first product gives, scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.second_order import differentiable_once
from .adapters import add_product, as_operand, scaled_product
from .projections import (
    Weight,
    as_stored,
    flatten_tokens,
    formats,
    from_stored,
    linear,
    linear_input_gradient,
    made_if_checkpointed,
)


class LoraLinear(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias + Σ scale * x_i @ aᵀ @ bᵀ``.

    ``apply(scales, x, weight, bias, *tensors)`` takes the scales of the adapters, ``[..., H]``, a frozen ``[N, H]``,
    which may be quantised, ``[N]`` or None, and for each adapter its own input or None, ``a`` and ``b``.
    """

    @staticmethod
    def forward(
        ctx, scales: tuple[float, ...], x: Tensor, weight: Weight, bias: Tensor | None, *tensors: Tensor | None
    ) -> Tensor:
        (weight,) = made_if_checkpointed([weight])
        y, low_rank = lora_forward(scales, x, weight, bias, *tensors)
        ctx.scales, ctx.shape, ctx.formats = scales, x.shape, formats([weight])
        ctx.save_for_backward(x if None in tensors[::3] else None, as_stored(weight), *tensors, *low_rank)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, stored, *tensors = saved
        (weight,) = from_stored([stored], ctx.formats)
        tensors, low_rank = tensors[: 3 * len(ctx.scales)], tensors[3 * len(ctx.scales) :]
        _, needs_x, _, needs_bias, *needs = ctx.needs_input_grad
        d_y = flatten_tokens(grad)
        d_x = linear_input_gradient(d_y, weight) if needs_x else None
        gradients: list[Tensor | None] = []
        for place, (scale, small) in enumerate(zip(ctx.scales, low_rank)):
            own, a, b = tensors[3 * place : 3 * place + 3]
            needs_own, needs_a, needs_b = needs[3 * place : 3 * place + 3]
            d_y_operand = as_operand(d_y, b.dtype)
            d_small = scaled_product(d_y_operand, b, scale)
            given = x if own is None else own
            d_a = scaled_product(d_small.t(), as_operand(flatten_tokens(given), a.dtype)) if needs_a else None
            d_b = scaled_product(d_y_operand.t(), small) if needs_b else None
            gradients += [(d_small @ a).view(own.shape).to(own.dtype) if needs_own else None, d_a, d_b]
            if own is None and d_x is not None:
                add_product(d_x, d_small, a)
        d_bias = d_y.sum(0) if needs_bias else None
        return None, None if d_x is None else d_x.view(ctx.shape), None, d_bias, *gradients


def lora_forward(
    scales: tuple[float, ...], x: Tensor, weight: Weight, bias: Tensor | None, *tensors: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Compute what :class:`LoraLinear` does, and return the products with each ``a`` with it, scaled."""
    y, low_rank = linear(x, weight, bias), []
    rows = flatten_tokens(y)
    for scale, own, a, b in zip(scales, tensors[::3], tensors[1::3], tensors[2::3]):
        assert a is not None
        assert b is not None
        small = scaled_product(as_operand(flatten_tokens(x if own is None else own), a.dtype), a.t(), scale)
        add_product(rows, small, b.t())
        low_rank.append(small)
    return y, low_rank
