"""Several linear layers of one input, each with an adapter of that input, as one node of autograd.

The first products of all adapters are one, and so are the gradients of their factors ``a``, and what the adapters give
to the gradient of the input. They are transposed, ``[ΣR, T]``: those of each adapter lie together, and are not copied.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class MultiLoraLinear(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias + scale * x @ aᵀ @ bᵀ`` for several layers.

    ``apply(scales, x, *tensors)`` takes a scale for each layer, ``[..., H]``, and for each layer a frozen ``[N, H]``,
    ``[N]`` or None, ``a`` ``[R, H]`` and ``b`` ``[N, R]``; all ``a`` and ``b`` are of one dtype. Frozen
    weights may be quantised.
    """

    @staticmethod
    def forward(ctx, scales: tuple[float, ...], x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        given = [*tensors]
        given[::4] = made_if_checkpointed(tensors[::4])  # type: ignore[arg-type]
        outputs, low_rank = multi_lora_forward(scales, x, *given)
        ctx.scales, ctx.formats = scales, formats(given[::4])
        kept = (tensor for place, tensor in enumerate(given) if place % 4 > 1)
        ctx.save_for_backward(x, low_rank, *map(as_stored, given[::4]), *kept)
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    @differentiable_once
    def backward(ctx, saved: tuple[Tensor, ...], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, low_rank, *tensors = saved
        number = len(grads)
        weights, a, b = from_stored(tensors[:number], ctx.formats), tensors[number::2], tensors[number + 1 :: 2]
        _, needs_x, *needs = ctx.needs_input_grad
        gradients: list[Tensor | None] = [None] * len(needs)
        used = [place for place, grad in enumerate(grads) if grad is not None]
        d_outputs = [flatten_tokens(grads[place]) for place in used]  # type: ignore[arg-type]
        small = low_rank.split([each.shape[0] for each in a])
        ranks = [a[place].shape[0] for place in used]
        d_low_rank = low_rank.new_empty(sum(ranks), low_rank.shape[1])
        for place, d_y, d_small in zip(used, d_outputs, d_low_rank.split(ranks)):
            d_y_operand = as_operand(d_y, low_rank.dtype)
            scaled_product(b[place].t(), d_y_operand.t(), ctx.scales[place], out=d_small)
            if needs[4 * place + 1]:
                gradients[4 * place + 1] = d_y.sum(0)
            if needs[4 * place + 3]:
                gradients[4 * place + 3] = scaled_product(d_y_operand.t(), small[place].t())
            del d_y_operand
        if any(needs[2::4]):
            d_a = scaled_product(d_low_rank, as_operand(flatten_tokens(x), low_rank.dtype))
            for place, each in zip(used, d_a.split(ranks)):
                gradients[4 * place + 2] = each if needs[4 * place + 2] else None
        d_x = None
        if needs_x:
            d_x = shared_input_gradient(d_outputs, [weights[place] for place in used])
            add_product(d_x, d_low_rank.t(), _stack_rows([a[place] for place in used]))
            d_x = d_x.view(x.shape)
        return None, d_x, *gradients


def multi_lora_forward(
    scales: tuple[float, ...], x: Tensor, *tensors: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Compute what :class:`MultiLoraLinear` does, and return the products with all ``a``, scaled: ``[ΣR, T]``."""
    weights, biases, a, b = (tensors[kind::4] for kind in range(4))
    stacked, ranks = _stack_rows(a), [each.shape[0] for each in a]  # type: ignore[arg-type, union-attr]
    is_one_scale = len(set(scales)) == 1
    operand = as_operand(flatten_tokens(x), stacked.dtype)
    low_rank = scaled_product(stacked, operand.t(), scales[0] if is_one_scale else 1)
    if not is_one_scale:
        for small, scale in zip(low_rank.split(ranks), scales):
            small.mul_(scale)
    outputs, given = [], x.to(weights[0].dtype)  # type: ignore[union-attr]
    for weight, bias, small, factor in zip(weights, biases, low_rank.split(ranks), b):
        y = linear(given, weight, bias, x.dtype)  # type: ignore[arg-type]
        add_product(flatten_tokens(y), small.t(), factor.t())  # type: ignore[union-attr]
        outputs.append(y)
    return tuple(outputs), low_rank


def _stack_rows(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(tuple(matrices))
