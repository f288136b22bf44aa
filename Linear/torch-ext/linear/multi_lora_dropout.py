"""Several linear layers of one input, each with an adapter that drops elements of that input, as one node of autograd.

Each adapter drops others, so that their products are apart. The input is cast once and kept once, in its own dtype, and
with it the masks: what they left is computed again. What the adapters give to the gradient of the input is added up in
their dtype, and rounded once with what the layers give.

What is kept of a dropout is its mask, with which its input is multiplied again. ``torch.nn.functional.dropout`` ends in
the same operator, and draws the same numbers: op-plugin, op_plugin/ops/opapi/NativeDropoutKernelNpuOpApi.cpp, where
``native_dropout`` is ``_npu_dropout``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.second_order import differentiable_once
from .adapters import add_product, as_operand, scaled_product
from .projections import (
    as_stored,
    flatten_tokens,
    formats,
    from_stored,
    linear,
    made_if_checkpointed,
    shared_input_gradient,
)

# for each layer the scale of its adapter, and with which probability that drops elements
ScalesAndProbabilities = tuple[tuple[float, float], ...]


class MultiLoraDropout(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias + scale * dropout(x, p) @ aᵀ @ bᵀ`` for several layers.

    ``apply(options, x, *tensors)`` takes a scale and a probability for each layer, ``[..., H]``, and for each layer a
    frozen ``[N, H]``, ``[N]`` or None, ``a`` ``[R, H]`` and ``b`` ``[N, R]``; all ``a`` and ``b`` are of one dtype.
    Masks are drawn in the order of the layers. Frozen weights may be quantised.
    """

    @staticmethod
    def forward(ctx, options: ScalesAndProbabilities, x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        given = [*tensors]
        given[::4] = made_if_checkpointed(tensors[::4])  # type: ignore[arg-type]
        outputs, low_rank, masks = multi_lora_dropout_forward(options, x, *given)
        ctx.options, ctx.formats = options, formats(given[::4])
        kept = (tensor for place, tensor in enumerate(given) if place % 4 > 1)
        ctx.save_for_backward(x, *low_rank, *masks, *map(as_stored, given[::4]), *kept)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, saved: tuple[Tensor, ...], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        number = len(grads)
        x, *tensors = saved
        low_rank, masks, tensors = tensors[:number], tensors[number : 2 * number], tensors[2 * number :]
        weights, a, b = from_stored(tensors[:number], ctx.formats), tensors[number::2], tensors[number + 1 :: 2]
        _, needs_x, *needs = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * len(needs)
        used = [place for place, grad in enumerate(grads) if grad is not None]
        d_outputs = [flatten_tokens(grads[place]) for place in used]  # type: ignore[arg-type]
        wide = flatten_tokens(x).to(a[0].dtype) if any(needs[2::4]) else None
        d_x_lora = None
        for place, d_y in zip(used, d_outputs):
            scale, p = ctx.options[place]
            d_y_operand = as_operand(d_y, b[place].dtype)
            d_small = scaled_product(d_y_operand, b[place], scale)
            if needs[4 * place + 1]:
                gradients[4 * place + 1] = d_y.sum(0)
            if needs[4 * place + 3]:
                gradients[4 * place + 3] = scaled_product(d_y_operand.t(), low_rank[place])
            del d_y_operand
            if needs[4 * place + 2]:
                gradients[4 * place + 2] = d_small.t() @ apply_dropout_mask(wide, masks[place], p)  # type: ignore[arg-type]
            if needs_x:
                part = apply_dropout_mask(d_small @ a[place], masks[place], p)
                d_x_lora = part if d_x_lora is None else d_x_lora.add_(part)
                del part
        del wide
        if d_x_lora is None:
            return None, None, *gradients
        d_x = shared_input_gradient(d_outputs, [weights[place] for place in used])
        return None, d_x.add_(d_x_lora).view(x.shape), *gradients


def multi_lora_dropout_forward(
    options: ScalesAndProbabilities, x: Tensor, *tensors: Tensor | None
) -> tuple[tuple[Tensor, ...], list[Tensor], list[Tensor]]:
    """Compute what :class:`MultiLoraDropout` does, and return the products with each ``a``, scaled, and the masks."""
    weights, biases, a, b = (tensors[kind::4] for kind in range(4))
    wide = flatten_tokens(x).to(a[0].dtype)  # type: ignore[union-attr]
    outputs, low_rank, masks = [], [], []
    given = x.to(weights[0].dtype)  # type: ignore[union-attr]
    for (scale, p), weight, bias, one, other in zip(options, weights, biases, a, b):
        y = linear(given, weight, bias, x.dtype)  # type: ignore[arg-type]
        dropped, mask = dropout_with_mask(wide, p)
        small = scaled_product(dropped, one.t(), scale)  # type: ignore[union-attr]
        del dropped
        add_product(flatten_tokens(y), small, other.t())  # type: ignore[union-attr]
        outputs.append(y)
        low_rank.append(small)
        masks.append(mask)
    return tuple(outputs), low_rank, masks


def dropout_with_mask(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return ``x / (1 - p)`` where an element is kept and zero elsewhere, and the mask that says which are kept."""
    return torch.native_dropout(x, p, True)


def apply_dropout_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return ``x / (1 - p)`` where a mask keeps an element and zero elsewhere: a dropout again, or its gradient."""
    return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - p))
