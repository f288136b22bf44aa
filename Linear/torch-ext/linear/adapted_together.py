"""Several linear layers of one input, each with an adapter of that input, as one node of autograd.

The first products of all adapters are one, and so are the gradients of their factors ``a``, and what the adapters give
to the gradient of the input. They are transposed, ``[ΣR, T]``: those of each adapter lie together, and are not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ._common.derivatives import by_formula, gradients
from .adapters import Adapter, add_product, in_torch, operand, scaled_product
from .products import product, rows_of
from .several import gradients_of


class AdaptedLinears(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias + scale * x @ aᵀ @ bᵀ`` for several layers.

    ``apply(scales, x, *tensors)`` takes a scale for each layer, ``[..., H]``, and for each layer a frozen ``[N, H]``,
    ``[N]`` or None, ``a`` ``[R, H]`` and ``b`` ``[N, R]``; all ``a`` and ``b`` are of one dtype.
    """

    @staticmethod
    def forward(ctx, scales: tuple[float, ...], x: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        outputs, kept = outputs_of(scales, x, *tensors)
        ctx.scales, ctx.biases = scales, tensors[1::4]
        ctx.save_for_backward(x, kept, *(tensor for place, tensor in enumerate(tensors) if place % 4 != 1))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, kept, *tensors = ctx.saved_tensors
        weights, a, b = tensors[::3], tensors[1::3], tensors[2::3]
        _, needs_x, *needs = ctx.needs_input_grad
        found: list[Tensor | None] = [None] * len(needs)
        used = [place for place, grad in enumerate(grads) if grad is not None]
        if by_formula(*grads):
            layers = [*zip(weights, ctx.biases, a, b)]
            return None, *one_by_one(partial(_formula, ctx.scales), x, layers, grads, needs_x, needs)
        rows = [rows_of(grads[place]) for place in used]  # type: ignore[arg-type]
        small = kept.split([each.shape[0] for each in a])
        sizes = [a[place].shape[0] for place in used]
        d_small = kept.new_empty(sum(sizes), kept.shape[1])
        for place, each, part in zip(used, rows, d_small.split(sizes)):
            wide = operand(each, kept.dtype)
            scaled_product(b[place].t(), wide.t(), ctx.scales[place], out=part)
            if needs[4 * place + 1]:
                found[4 * place + 1] = each.sum(0)
            if needs[4 * place + 3]:
                found[4 * place + 3] = scaled_product(wide.t(), small[place].t())
            del wide
        if any(needs[2::4]):
            d_a = scaled_product(d_small, operand(rows_of(x), kept.dtype))
            for place, each in zip(used, d_a.split(sizes)):
                found[4 * place + 2] = each if needs[4 * place + 2] else None
        d_x = None
        if needs_x:
            d_x, _ = gradients_of(rows, rows_of(x), [weights[place] for place in used], True, [False] * len(used))
            assert d_x is not None
            add_product(d_x, d_small.t(), _stacked([a[place] for place in used]))
        return None, None if d_x is None else d_x.view(x.shape), *found


def outputs_of(scales: tuple[float, ...], x: Tensor, *tensors: Tensor | None) -> tuple[tuple[Tensor, ...], Tensor]:
    """Compute what :class:`AdaptedLinears` does, and return the adapters' first products, scaled: ``[ΣR, T]``."""
    weights, biases, a, b = (tensors[kind::4] for kind in range(4))
    joined, sizes = _stacked(a), [each.shape[0] for each in a]  # type: ignore[arg-type, union-attr]
    is_one_scale = len(set(scales)) == 1
    kept = scaled_product(joined, operand(rows_of(x), joined.dtype).t(), scales[0] if is_one_scale else 1)
    if not is_one_scale:
        for small, scale in zip(kept.split(sizes), scales):
            small.mul_(scale)
    outputs = []
    for weight, bias, small, factor in zip(weights, biases, kept.split(sizes), b):
        y = product(x, weight, bias)  # type: ignore[arg-type]
        add_product(rows_of(y), small.t(), factor.t())  # type: ignore[union-attr]
        outputs.append(y)
    return tuple(outputs), kept


def _stacked(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def one_by_one(
    formula: Callable[[int], Callable[..., Tensor]],
    x: Tensor,
    layers: Sequence[tuple[Tensor | None, ...]],
    grads: Sequence[Tensor | None],
    needs_x: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Compute the gradients of several layers in such a way that they can be differentiated themselves.

    Args:
        formula: gives for a place the function that computes the layer, of ``x`` and the four tensors of the layer.
        x: the input of all of them.
        layers: weight, bias, ``a`` and ``b`` of each.
        grads: the gradient of what each has given, None if nothing was made of that.
        needs_x: whether the gradient of ``x`` is wanted.
        needs: of which of all the layers' tensors it is.

    Returns:
        The gradient of ``x``, and those of the layers' tensors; None for what is not wanted.
    """
    total: Tensor | None = None
    found: list[Tensor | None] = [None] * len(needs)
    for place, (layer, grad) in enumerate(zip(layers, grads)):
        if grad is None:
            continue
        span = slice(4 * place, 4 * place + 4)
        d_x, *found[span] = gradients(formula(place), (x, *layer), (needs_x, *needs[span]), grad)
        if d_x is not None:
            total = d_x if total is None else total + d_x
    return [total, *found]


def _formula(scales: tuple[float, ...], place: int) -> Callable[..., Tensor]:
    """Return the formula of one of the layers as a function of tensors."""

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
        return in_torch(x, weight, bias, Adapter(a, b, scales[place]))

    return layer
