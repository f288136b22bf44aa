"""A linear layer with adapters as one node of autograd.

Node by node that is the product of the layer, two small ones, a scale and an addition of the size of the output for
each adapter; backward has the scale again, and a copy of each weight gradient. Here the scale is applied to what the
first small product gives, and so neither to an output nor to its gradient. Kept are the input of each adapter, once,
and what its first product gives, scaled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.derivatives import by_formula, gradients
from .adapters import Adapter, add_product, in_torch, operand, scaled_product
from .products import product, rows_of


class AdaptedLinear(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias + Σ scale * x_i @ aᵀ @ bᵀ``.

    ``apply(scales, x, weight, bias, *tensors)`` takes the scales of the adapters, ``[..., H]``, a frozen ``[N, H]``,
    ``[N]`` or None, and for each adapter its own input or None, ``a`` and ``b``.
    """

    @staticmethod
    def forward(
        ctx, scales: tuple[float, ...], x: Tensor, weight: Tensor, bias: Tensor | None, *tensors: Tensor | None
    ) -> Tensor:
        y, kept = outputs_of(scales, x, weight, bias, *tensors)
        ctx.scales, ctx.shape, ctx.bias = scales, x.shape, bias
        ctx.save_for_backward(x if None in tensors[::3] else None, weight, *tensors, *kept)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *tensors = ctx.saved_tensors
        tensors, kept = tensors[: 3 * len(ctx.scales)], tensors[3 * len(ctx.scales) :]
        _, *needs = ctx.needs_input_grad
        if by_formula(grad):
            x = weight.new_zeros(ctx.shape) if x is None else x  # then its gradient does not depend on it
            return None, *gradients(_by(ctx.scales), (x, weight, ctx.bias, *tensors), needs, grad)
        needs_x, needs_bias = needs[0], needs[2]
        rows = rows_of(grad)
        d_x = rows @ weight if needs_x else None
        found: list[Tensor | None] = []
        for place, (scale, small) in enumerate(zip(ctx.scales, kept)):
            own, a, b = tensors[3 * place : 3 * place + 3]
            needs_own, needs_a, needs_b = needs[3 + 3 * place : 6 + 3 * place]
            wide = operand(rows, b.dtype)
            d_small = scaled_product(wide, b, scale)
            d_a = scaled_product(d_small.t(), operand(rows_of(x if own is None else own), a.dtype)) if needs_a else None
            d_b = scaled_product(wide.t(), small) if needs_b else None
            found += [(d_small @ a).view(own.shape).to(own.dtype) if needs_own else None, d_a, d_b]
            if own is None and d_x is not None:
                add_product(d_x, d_small, a)
        return None, None if d_x is None else d_x.view(ctx.shape), None, rows.sum(0) if needs_bias else None, *found


def outputs_of(
    scales: tuple[float, ...], x: Tensor, weight: Tensor, bias: Tensor | None, *tensors: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Compute what :class:`AdaptedLinear` does, and return the small products with it, scaled."""
    y, kept = product(x, weight, bias), []
    rows = rows_of(y)
    for scale, own, a, b in zip(scales, tensors[::3], tensors[1::3], tensors[2::3]):
        assert a is not None
        assert b is not None
        small = scaled_product(operand(rows_of(x if own is None else own), a.dtype), a.t(), scale)
        add_product(rows, small, b.t())
        kept.append(small)
    return y, kept


def _by(scales: tuple[float, ...]):
    """Return the formula of a layer with adapters of these scales, as a function of tensors."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, *tensors: Tensor) -> Tensor:
        adapters = [Adapter(a, b, s, own) for s, own, a, b in zip(scales, tensors[::3], tensors[1::3], tensors[2::3])]
        return in_torch(x, weight, bias, *adapters)

    return layer
