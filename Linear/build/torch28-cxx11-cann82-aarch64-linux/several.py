"""Several linear layers of one input as one node of autograd.

Node by node each layer gives a gradient of the input, and autograd adds them. Here gradients and weights are laid side
by side where that moves less: then the gradient of the input is one product, which adds up in float32 and is rounded
once, and the gradients of the weights are another.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .products import of_input_and_weight, product, rows_of


class Linears(torch.autograd.Function):
    """Computes ``x @ weightᵀ + bias`` for several weights.

    ``apply(x, number, *weights, *biases)`` takes ``[..., H]``, how many there are, weights ``[N, H]``, each with its N,
    and their biases ``[N]`` or None. What the backward computes can be differentiated in its turn.
    """

    @staticmethod
    def forward(ctx, x: Tensor, number: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[:number], parameters[number:]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple([product(x, weight, bias) for weight, bias in zip(weights, biases)])  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        number = len(weights)
        needs_x, _, *needs = ctx.needs_input_grad
        used = [index for index, grad in enumerate(grads) if grad is not None]
        found: list[Tensor | None] = [None] * (2 * number)
        if not used:
            return None, None, *found
        rows = [rows_of(grads[index]) for index in used]  # type: ignore[arg-type]
        for index, grad in zip(used, rows):
            if needs[number + index]:
                found[number + index] = grad.sum(0)
        d_x, d_weights = gradients_of(rows, rows_of(x), [weights[i] for i in used], needs_x, [needs[i] for i in used])
        for index, d_weight in zip(used, d_weights):
            found[index] = d_weight
        return None if d_x is None else d_x.view(x.shape), None, *found


def gradients_of(
    grads: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor], needs_x: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    """Compute the gradients of ``x @ weightᵀ`` for several weights: of ``x`` their sum, and of each weight.

    Args:
        grads: ``[T, N]`` for each weight.
        x: ``[T, H]``.
        weights: ``[N, H]`` each.
        needs_x: whether the gradient of ``x`` is wanted.
        needs: of which weights it is.
    """
    wanted = needs[0]
    if len(weights) > 1 and needs_x and all(each == wanted for each in needs) and _is_less_to_join(x, weights, wanted):
        sizes = [weight.shape[0] for weight in weights]
        d_x, d_weight = of_input_and_weight(torch.cat(tuple(grads), 1), x, torch.cat(tuple(weights)), True, wanted)
        return d_x, [None] * len(weights) if d_weight is None else d_weight.split(sizes)
    total, d_weights = None, []
    for grad, weight, needed in zip(grads, weights, needs):
        d_x, d_weight = of_input_and_weight(grad, x, weight, needs_x, needed)
        d_weights.append(d_weight)
        if d_x is not None:
            total = d_x if total is None else total + d_x if torch.is_grad_enabled() else total.add_(d_x)
    return total, d_weights


def _is_less_to_join(x: Tensor, weights: Sequence[Tensor], wanted: bool) -> bool:
    """Tell whether laying gradients and weights side by side moves less than going one by one.

    In numbers: joined, every gradient and every weight is read and written once more. One by one, for every weight but
    the first a gradient of ``x`` is written, both are read and their sum is written; ``x`` is read again for the
    gradient of the weight, if that is wanted.
    """
    tokens, size = x.shape
    outputs = sum(weight.shape[0] for weight in weights)
    return (4 + wanted) * (len(weights) - 1) * tokens * size >= 2 * outputs * (tokens + size)
