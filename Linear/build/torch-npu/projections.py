"""The product that a linear layer is, and the gradient of its input; weights are frozen, and have none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``x @ weightᵀ + bias``, as no view: autograd lets nobody write to a view that a node of ours gives."""
    y = F.linear(x, weight, bias)
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def flatten_tokens(x: Tensor) -> Tensor:
    """View, or copy, a tensor ``[..., H]`` as a matrix ``[T, H]``."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def shared_input_gradient(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Compute ``Σ grad @ weight``, the gradient of an input that several layers share.

    Gradients and weights are laid side by side where that moves less than adding up one product for each: then it is
    one product, which adds up in float32 and is rounded once.

    Args:
        grads: ``[T, N]`` for each layer.
        weights: ``[N, H]`` each.
    """
    if len(weights) > 1 and _is_less_to_join(grads, weights):
        return torch.cat(tuple(grads), 1) @ torch.cat(tuple(weights))
    total = grads[0] @ weights[0]
    for grad, weight in zip(grads[1:], weights[1:]):
        total.add_(grad @ weight)
    return total


def _is_less_to_join(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Tell whether laying gradients and weights side by side moves less than going one by one.

    In numbers: joined, every gradient and every weight is read and written once more. One by one, for every weight but
    the first a gradient of the input is written, both are read and their sum is written.
    """
    tokens, size = grads[0].shape[0], weights[0].shape[1]
    outputs = sum(weight.shape[0] for weight in weights)
    return 4 * (len(weights) - 1) * tokens * size >= 2 * outputs * (tokens + size)
