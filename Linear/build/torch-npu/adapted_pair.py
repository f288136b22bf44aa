"""Two linear layers whose weights are neighbours, each with an adapter of their input, as one product.

That is gate and up of an MLP. What both give is one tensor, and so is its gradient: nothing is laid side by side, and
no operator copies a strided half of it. The second factors of the adapters are the blocks of one matrix, zero
elsewhere: it is small, and multiplies with both at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.adjacent_storage import joined, with_neighbour
from ._common.derivatives import by_formula, gradients
from .adapters import Adapter, add_product, in_torch, operand, scaled_product
from .products import product, rows_of


class AdaptedPair(torch.autograd.Function):
    """Computes ``x @ weightᵀ + scale * x @ aᵀ @ bᵀ`` of two layers, the second behind the first: ``[..., 2·N]``.

    ``apply(scale, x, *tensors)`` takes ``[..., H]``, and for each layer a frozen weight ``[N, H]``, ``a`` ``[R, H]``
    and ``b`` ``[N, R]``. The weights are neighbours; ranks may differ.
    """

    @staticmethod
    def forward(ctx, scale: float, x: Tensor, *tensors: Tensor) -> Tensor:
        y, small, blocks = pair_of(scale, x, *tensors)
        ctx.scale = scale
        ctx.save_for_backward(x, small, blocks, *tensors)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, small, blocks, *tensors = ctx.saved_tensors
        _, *needs = ctx.needs_input_grad
        if by_formula(grad):
            return None, *gradients(_by(ctx.scale), (x, *tensors), needs, grad)
        weights, a, b = tensors[::3], tensors[1::3], tensors[2::3]
        needs_x, needs_a, needs_b = needs[0], needs[2::3], needs[3::3]
        ranks, size = [each.shape[0] for each in a], b[0].shape[0]
        rows = rows_of(grad)
        wide = operand(rows, blocks.dtype)
        d_small = scaled_product(wide, blocks, ctx.scale)
        d_a = d_b = [None, None]
        if any(needs_b):
            both = scaled_product(wide.t(), small)
            d_b = [both[:size, : ranks[0]], both[size:, ranks[0] :]]
        del wide
        if any(needs_a):
            d_a = scaled_product(d_small.t(), operand(rows_of(x), blocks.dtype)).split(ranks)
        d_x = None
        if needs_x:
            d_x = rows @ joined(*weights)
            add_product(d_x, d_small, torch.cat(tuple(a)))
            d_x = d_x.view(x.shape)
        found: list[Tensor | None] = []
        for place in range(2):
            found += [None, d_a[place] if needs_a[place] else None, d_b[place] if needs_b[place] else None]
        return None, d_x, *found


def pair_of(scale: float, x: Tensor, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute what :class:`AdaptedPair` does, and return the first products of the adapters, scaled, and the blocks."""
    weights, a, b = tensors[::3], tensors[1::3], tensors[2::3]
    blocks = _blocks(b)
    y = product(x, with_neighbour(weights[0]), None)
    small = scaled_product(operand(rows_of(x), blocks.dtype), torch.cat(tuple(a)).t(), scale)
    add_product(rows_of(y), small, blocks.t())
    return y, small, blocks


def _blocks(b: tuple[Tensor, ...]) -> Tensor:
    """Return two matrices as the blocks of one, ``[2·N, R + S]``."""
    first, second = b
    blocks = first.new_zeros(2 * first.shape[0], first.shape[1] + second.shape[1])
    blocks[: first.shape[0], : first.shape[1]].copy_(first)
    blocks[first.shape[0] :, first.shape[1] :].copy_(second)
    return blocks


def _by(scale: float):
    """Return the formula of the two layers as a function of tensors."""

    def pair(x: Tensor, *tensors: Tensor) -> Tensor:
        layers = zip(tensors[::3], tensors[1::3], tensors[2::3])
        return torch.cat([in_torch(x, weight, None, Adapter(a, b, scale)) for weight, a, b in layers], -1)

    return pair
