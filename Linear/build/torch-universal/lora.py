"""Linear layers of one input with adapters of their own as one node of autograd: an adapter's products are apart.

Node by node that is the product of the layer, two small ones, a scale and an addition of the size of the output for
each adapter; backward has the scale again, and a copy of each weight gradient. Here the scale is applied to what the
first small product gives, and so neither to an output nor to its gradient. Kept are the input of each adapter, once,
and what its first product gives, scaled.

An adapter may drop elements of the input, each others. Then the input is cast once and kept once, in its own dtype, and
with it the masks: what they left is computed again. What these adapters give to the gradient of the input is added up
in their dtype, and rounded once with what the layers give. ``torch.nn.functional.dropout`` ends in the same operator,
and draws the same numbers: op-plugin, op_plugin/ops/opapi/NativeDropoutKernelNpuOpApi.cpp, where ``native_dropout`` is
``_npu_dropout``.
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
    made_if_checkpointed,
    shared_input_gradient,
)

# of each layer its adapters, and of each of these the scale, and with which probability it drops elements
ScalesAndProbabilities = tuple[tuple[tuple[float, float], ...], ...]


class LoraLinear(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias + Σ scale * dropout(x_i, p) @ aᵀ @ bᵀ`` for each of several layers.

    ``apply(options, x, *tensors)`` takes the scales and probabilities, ``[..., H]``, the frozen ``[N, H]`` of all
    layers, which may be quantised, their biases ``[N]`` or None, and for each adapter of each layer its own input or
    None, ``a`` and ``b``. Masks are drawn in this order; whose input is its own has a probability of zero.
    """

    @staticmethod
    def forward(ctx, options: ScalesAndProbabilities, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        number = len(options)
        weights = made_if_checkpointed(tensors[:number])  # type: ignore[arg-type]
        outputs, low_rank, masks = lora_forward(options, x, *weights, *tensors[number:])
        ctx.options, ctx.shape, ctx.formats = options, x.shape, formats(weights)
        kept = x if None in tensors[2 * number :: 3] else None
        ctx.save_for_backward(kept, *map(as_stored, weights), *tensors[2 * number :], *low_rank, *masks)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, saved: tuple[Tensor, ...], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *tensors = saved
        number, scales = len(grads), [each for terms in ctx.options for each in terms]
        weights, count = from_stored(tensors[:number], ctx.formats), len(scales)
        factors, low_rank, masks = tensors[number:][: 3 * count], tensors[-2 * count : -count], tensors[-count:]
        _, needs_x, *needs = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * len(needs)
        d_outputs = [None if grad is None else flatten_tokens(grad) for grad in grads]
        owners = [layer for layer, terms in enumerate(ctx.options) for _ in terms]
        wide = d_x = None
        plain = []  # products of these adapters are added to what the layers give
        for place, (layer, (scale, p)) in enumerate(zip(owners, scales)):
            if (d_y := d_outputs[layer]) is None:
                continue
            (own, a, b), at = factors[3 * place : 3 * place + 3], 2 * number + 3 * place
            needs_own, needs_a, needs_b = needs[at : at + 3]
            d_y_operand = as_operand(d_y, b.dtype)
            d_small = scaled_product(d_y_operand, b, scale)
            gradients[at + 2] = scaled_product(d_y_operand.t(), low_rank[place]) if needs_b else None
            del d_y_operand
            if p:
                if needs_a:
                    wide = flatten_tokens(x).to(a.dtype) if wide is None else wide
                    gradients[at + 1] = d_small.t() @ apply_dropout_mask(wide, masks[place], p)
                if needs_x:
                    part = apply_dropout_mask(d_small @ a, masks[place], p)
                    d_x = part if d_x is None else d_x.add_(part)
                    del part
                continue
            if needs_a:
                operand = as_operand(flatten_tokens(x if own is None else own), a.dtype)
                d_a = scaled_product(d_small.t(), operand)
                gradients[at + 1] = d_a
            if own is None:
                plain.append((d_small, a))
            elif needs_own:
                gradients[at] = (d_small @ a).view(own.shape).to(own.dtype)
        del wide
        for layer, d_y in enumerate(d_outputs):
            if d_y is not None and needs[number + layer]:
                gradients[number + layer] = d_y.sum(0)
        used = [(d_y, weight) for d_y, weight in zip(d_outputs, weights) if d_y is not None]
        if not needs_x or not used:
            return None, None, *gradients
        dropped, d_x = d_x, shared_input_gradient(*zip(*used))
        for d_small, a in plain:
            add_product(d_x, d_small, a)
        return None, (d_x if dropped is None else d_x.add_(dropped)).view(ctx.shape), *gradients


def lora_forward(
    options: ScalesAndProbabilities, x: Tensor, *tensors: Weight | None
) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor | None]]:
    """Compute what :class:`LoraLinear` does, and return the products with each ``a`` with it, scaled, and the masks."""
    number = len(options)
    weights, biases, factors = tensors[:number], tensors[number : 2 * number], tensors[2 * number :]
    given, wide = x.to(weights[0].dtype), None  # type: ignore[union-attr]
    outputs, low_rank, masks = [], [], []
    adapters = zip(factors[::3], factors[1::3], factors[2::3])
    for weight, bias, terms in zip(weights, biases, options):
        y = linear(given, weight, bias, x.dtype)  # type: ignore[arg-type]
        for (scale, p), (own, a, b) in zip(terms, adapters):
            mask = None
            if p:
                wide = flatten_tokens(x).to(a.dtype) if wide is None else wide  # type: ignore[union-attr]
                operand, mask = dropout_with_mask(wide, p)
            else:
                operand = as_operand(flatten_tokens(x if own is None else own), a.dtype)  # type: ignore[arg-type, union-attr]
            small = scaled_product(operand, a.t(), scale)  # type: ignore[union-attr]
            del operand
            add_product(flatten_tokens(y), small, b.t())  # type: ignore[union-attr]
            low_rank.append(small)
            masks.append(mask)
        outputs.append(y)
    return tuple(outputs), low_rank, masks


def dropout_with_mask(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return ``x / (1 - p)`` where an element is kept and zero elsewhere, and the mask that says which are kept."""
    return torch.native_dropout(x, p, True)


def apply_dropout_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return ``x / (1 - p)`` where a mask keeps an element and zero elsewhere: a dropout again, or its gradient."""
    return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - p))
