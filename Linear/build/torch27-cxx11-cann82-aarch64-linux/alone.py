"""One linear layer as one node of autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from .products import of_input_and_weight, product, rows_of


class Linear(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias``.

    ``apply(x, weight, bias)`` takes ``[..., H]``, ``[N, H]`` and ``[N]`` or None. What the backward computes can be
    differentiated in its turn.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = rows_of(grad)
        d_x, d_weight = of_input_and_weight(rows, rows_of(x), weight, needs_x, needs_weight)
        return None if d_x is None else d_x.view(x.shape), d_weight, rows.sum(0) if needs_bias else None
