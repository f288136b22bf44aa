"""Two linear layers whose weights are neighbours, each with an adapter of their input, as one product.

That is gate and up of an MLP. What both give is one tensor, and so is its gradient: nothing is laid side by side, and
no operator copies a strided half of it. The second factors of the adapters are the blocks of one matrix, zero
elsewhere: it is small, and multiplies with both at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.adjacent_storage import joined, with_neighbour
from ._common.second_order import differentiable_once
from .adapters import add_product, as_operand, scaled_product
from .projections import (
    QuantizedWeight,
    Weight,
    as_stored,
    flatten_tokens,
    formats,
    from_stored,
    linear,
    linear_input_gradient,
    made_as_one,
    made_if_checkpointed,
)


class PairedLoraLinear(torch.autograd.Function):
    """Computes ``x @ weightᵀ + scale * x @ aᵀ @ bᵀ`` of two layers, the second behind the first: ``[..., 2·N]``.

    ``apply(scale, x, *tensors)`` takes ``[..., H]``, and for each layer a frozen weight ``[N, H]``, ``a`` ``[R, H]``
    and ``b`` ``[N, R]``. The weights are neighbours, or both quantised; ranks may differ.
    """

    @staticmethod
    def forward(ctx, scale: float, x: Tensor, *tensors: Tensor) -> Tensor:
        given = [*tensors]
        given[::3] = made_if_checkpointed(tensors[::3])  # type: ignore[call-overload]
        y, low_rank, block_diagonal = paired_lora_forward(scale, x, *given)
        ctx.scale, ctx.formats = scale, formats(given[::3])
        kept = (tensor for place, tensor in enumerate(given) if place % 3)
        ctx.save_for_backward(x, low_rank, block_diagonal, *map(as_stored, given[::3]), *kept)
        return y

    @staticmethod
    @differentiable_once
    def backward(ctx, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, low_rank, block_diagonal, *tensors = saved
        _, needs_x, *needs = ctx.needs_input_grad
        weights, a, b = from_stored(tensors[:2], ctx.formats), tensors[2::2], tensors[3::2]
        needs_a, needs_b = needs[1::3], needs[2::3]
        ranks, size = [each.shape[0] for each in a], b[0].shape[0]
        d_y = flatten_tokens(grad)
        d_y_operand = as_operand(d_y, block_diagonal.dtype)
        d_low_rank = scaled_product(d_y_operand, block_diagonal, ctx.scale)
        d_a = d_b = [None, None]
        if any(needs_b):
            both = scaled_product(d_y_operand.t(), low_rank)
            d_b = [both[:size, : ranks[0]], both[size:, ranks[0] :]]
        del d_y_operand
        if any(needs_a):
            d_a = scaled_product(d_low_rank.t(), as_operand(flatten_tokens(x), block_diagonal.dtype)).split(ranks)
        d_x = None
        if needs_x:
            d_x = linear_input_gradient(d_y, _as_one(*weights))
            add_product(d_x, d_low_rank, torch.cat(tuple(a)))
            d_x = d_x.view(x.shape)
        gradients: list[Tensor | None] = []
        for place in range(2):
            gradients += [None, d_a[place] if needs_a[place] else None, d_b[place] if needs_b[place] else None]
        return None, d_x, *gradients


def paired_lora_forward(scale: float, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what :class:`PairedLoraLinear` does.

    Returns:
        What the layers give; the products with both ``a``, scaled, ``[T, R + S]``; and both ``b`` as one matrix.
    """
    weights, a, b = tensors[::3], tensors[1::3], tensors[2::3]
    block_diagonal = _block_diagonal(*b)
    y = linear(x, _as_one(*weights, are_neighbours=True), None)
    low_rank = scaled_product(as_operand(flatten_tokens(x), block_diagonal.dtype), torch.cat(tuple(a)).t(), scale)
    add_product(flatten_tokens(y), low_rank, block_diagonal.t())
    return y, low_rank, block_diagonal


def _as_one(first: Weight, second: Weight, are_neighbours: bool = False) -> Weight:
    """Return two weights as one, the first one first; quantised ones are made into one buffer."""
    if isinstance(first, QuantizedWeight) and isinstance(second, QuantizedWeight):
        return made_as_one([first, second])
    return with_neighbour(first) if are_neighbours else joined(first, second)  # type: ignore[arg-type]


def _block_diagonal(first: Tensor, second: Tensor) -> Tensor:
    """Return two matrices as the blocks of one, ``[2·N, R + S]``."""
    blocks = first.new_zeros(2 * first.shape[0], first.shape[1] + second.shape[1])
    blocks[: first.shape[0], : first.shape[1]].copy_(first)
    blocks[first.shape[0] :, first.shape[1] :].copy_(second)
    return blocks
