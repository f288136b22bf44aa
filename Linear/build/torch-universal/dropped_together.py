"""Several linear layers of one input, each with an adapter that drops elements of that input, as one node of autograd.

Each adapter drops others, so that their products are apart. The input is cast once and kept once, in its own dtype, and
with it the masks: what they left is computed again. What the adapters give to the gradient of the input is added up in
their dtype, and rounded once with what the layers give.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from . import masks
from ._common.derivatives import by_formula
from .adapted_together import one_by_one
from .adapters import Adapter, add_product, in_torch, operand, scaled_product
from .products import product, rows_of
from .several import gradients_of

# for each layer the scale of its adapter, and with which probability that drops elements
Factors = tuple[tuple[float, float], ...]


class DroppedLinears(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias + scale * dropout(x, p) @ aᵀ @ bᵀ`` for several layers.

    ``apply(factors, x, *tensors)`` takes a scale and a probability for each layer, ``[..., H]``, and for each layer a
    frozen ``[N, H]``, ``[N]`` or None, ``a`` ``[R, H]`` and ``b`` ``[N, R]``; all ``a`` and ``b`` are of one dtype.
    Masks are drawn in the order of the layers.
    """

    @staticmethod
    def forward(ctx, factors: Factors, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        outputs, small, drawn = outputs_of(factors, x, *tensors)
        ctx.factors, ctx.biases = factors, tensors[1::4]
        ctx.save_for_backward(x, *small, *drawn, *(tensor for place, tensor in enumerate(tensors) if place % 4 != 1))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        number = len(grads)
        x, *tensors = ctx.saved_tensors
        small, drawn, tensors = tensors[:number], tensors[number : 2 * number], tensors[2 * number :]
        weights, a, b = tensors[::3], tensors[1::3], tensors[2::3]
        _, needs_x, *needs = ctx.needs_input_grad
        found: list[Tensor | None] = [None] * len(needs)
        used = [place for place, grad in enumerate(grads) if grad is not None]
        if by_formula(*grads):
            layers = [*zip(weights, ctx.biases, a, b)]
            return None, *one_by_one(partial(_formula, ctx.factors, drawn), x, layers, grads, needs_x, needs)
        rows = [rows_of(grads[place]) for place in used]  # type: ignore[arg-type]
        given = rows_of(x).to(a[0].dtype) if any(needs[2::4]) else None
        total = None
        for place, each in zip(used, rows):
            scale, p = ctx.factors[place]
            wide = operand(each, b[place].dtype)
            d_small = scaled_product(wide, b[place], scale)
            if needs[4 * place + 1]:
                found[4 * place + 1] = each.sum(0)
            if needs[4 * place + 3]:
                found[4 * place + 3] = scaled_product(wide.t(), small[place])
            del wide
            if needs[4 * place + 2]:
                found[4 * place + 2] = d_small.t() @ masks.apply_mask(given, drawn[place], p)  # type: ignore[arg-type]
            if needs_x:
                part = masks.apply_mask(d_small @ a[place], drawn[place], p)
                total = part if total is None else total.add_(part)
                del part
        del given
        if total is None:
            return None, None, *found
        d_x, _ = gradients_of(rows, rows_of(x), [weights[place] for place in used], True, [False] * len(used))
        return None, d_x.add_(total).view(x.shape), *found  # type: ignore[union-attr]


def outputs_of(
    factors: Factors, x: Tensor, *tensors: Tensor | None
) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Compute what :class:`DroppedLinears` does, and return the small products, scaled, and the masks with it."""
    weights, biases, a, b = (tensors[kind::4] for kind in range(4))
    given = rows_of(x).to(a[0].dtype)  # type: ignore[union-attr]
    outputs, small, drawn = [], [], []
    for (scale, p), weight, bias, one, other in zip(factors, weights, biases, a, b):
        y = product(x, weight, bias)  # type: ignore[arg-type]
        kept, mask = masks.draw(given, p)
        first = scaled_product(kept, one.t(), scale)  # type: ignore[union-attr]
        del kept
        add_product(rows_of(y), first, other.t())  # type: ignore[union-attr]
        outputs.append(y)
        small.append(first)
        drawn.append(mask)
    return tuple(outputs), small, drawn


def _formula(factors: Factors, drawn: list[Tensor], place: int):
    """Return the formula of one of the layers, with its mask, as a function of tensors."""
    (scale, p), mask = factors[place], drawn[place]

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        kept = masks.apply_mask(rows_of(x).to(a.dtype), mask, p).view(x.shape)
        return in_torch(x, weight, bias, Adapter(a, b, scale, kept))

    return layer
