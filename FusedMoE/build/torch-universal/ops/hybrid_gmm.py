"""Grouped products with weights that are parameters of their own: one ``nn.Linear`` for each expert.

``npu_grouped_matmul`` takes the weights where they are, as a list; of float32 it takes one tensor, and they are joined
for the call. A list has at most 128 weights; more are multiplied 128 at a time, with the rows that belong to them moved
to the front by the device, which alone knows where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from .._common.adjacent_storage import joined
from .._common.checkpoints import unseen_by_checkpoints
from .._common.derivatives import by_formula, gradients
from . import gmm
from .gmm import MOST_LISTED, added_bias, bias_gradient, is_empty, sum_over_rows
from .reference import product_in_torch


class HybridGmmFunction(torch.autograd.Function):
    """Computes ``x[r] @ weight[e]ᵀ + bias[e]`` for the rows ``r`` of each group ``e``, one after the other: ``[M, N]``.

    ``apply(x, counts, tail, has_bias, *parameters)`` takes ``x`` ``[M, K]``, float16, bfloat16 or float32. ``counts``
    are the rows of each group as int64 ``[E]`` on the device, ``tail`` is boolean ``[M, 1]``, true for the rows after
    the last group, or None where there are none. ``parameters``, of the dtype of ``x``, are E weights ``[N, K]``, or
    first E and then E others that lie directly behind them in memory: the result has ``[M, 2·N]`` then. If
    ``has_bias``, as many biases ``[N]`` follow. Nothing is checked.

    The gradients of all weights are one product, of which each gets a view.
    """

    @staticmethod
    def forward(ctx, x: Tensor, counts: Tensor, tail: Tensor | None, has_bias: bool, *parameters: Tensor) -> Tensor:
        ctx.has_bias = has_bias
        ctx.save_for_backward(x, counts, tail, *parameters)
        if is_empty(x):
            return _in_torch(counts, has_bias, x, *parameters)
        return multiply(x, counts, tail, has_bias, parameters)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, counts, tail, *parameters = ctx.saved_tensors
        if by_formula(grad) or is_empty(x):
            needs = ctx.needs_input_grad[0], *ctx.needs_input_grad[4:]
            function = partial(_in_torch, counts, ctx.has_bias)
            d_x, *d_parameters = gradients(function, (x, *parameters), needs, grad)
            return d_x, None, None, None, *d_parameters
        needs_x, _, _, _, *needs = ctx.needs_input_grad
        grad = grad.contiguous()
        d_parameters = parameter_gradients(x, grad, counts, ctx.has_bias, parameters, needs)
        d_x = input_gradient(grad, counts, tail, ctx.has_bias, parameters) if needs_x else None
        return d_x, None, None, None, *d_parameters


def multiply(x: Tensor, counts: Tensor, tail: Tensor | None, has_bias: bool, parameters: Sequence[Tensor]) -> Tensor:
    """Compute what :class:`HybridGmmFunction` does, without a gradient."""
    weights, biases = _split(parameters, has_bias)
    experts = counts.shape[0]
    bias = added_bias(_stack(biases, experts), x.dtype) if biases else None
    return _multiply(x, _matrices(weights, experts, transposed=True), counts, bias, tail)


def stack_parameters(parameters: Sequence[Tensor], experts: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """Copy the parameters of :class:`HybridGmmFunction` into a weight ``[E, K, N]`` and a bias ``[E, N]``.

    They are differentiable; the bias is None where there is none.
    """
    weights, biases = _split(parameters, has_bias)
    return _stack(weights, experts).mT, _stack(biases, experts) if biases else None


def _in_torch(counts: Tensor, has_bias: bool, x: Tensor, *parameters: Tensor) -> Tensor:
    """Compute what :class:`HybridGmmFunction` does with operators of torch."""
    weight, bias = stack_parameters(parameters, counts.shape[0], has_bias)
    return product_in_torch(x, weight, counts, bias)


def input_gradient(
    grad: Tensor, counts: Tensor, tail: Tensor | None, has_bias: bool, parameters: Sequence[Tensor]
) -> Tensor:
    """Return the gradient of ``x`` of :class:`HybridGmmFunction`, ``[M, K]``."""
    weights, _ = _split(parameters, has_bias)
    return _multiply(grad, _matrices(weights, counts.shape[0], transposed=False), counts, None, tail)


def parameter_gradients(
    x: Tensor, grad: Tensor, counts: Tensor, has_bias: bool, parameters: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradients of those ``parameters`` of :class:`HybridGmmFunction` that need one, None for the others."""
    _, biases = _split(parameters, has_bias)
    needs_weights, needs_biases = _split(needs, has_bias)
    gradients: list[Tensor | None] = [None] * len(needs)
    if any(needs_weights):
        gradients[: len(needs_weights)] = _part_gradients(sum_over_rows(grad, x, counts), needs_weights)
    if any(needs_biases):
        gradients[len(needs_weights) :] = _part_gradients(bias_gradient(grad, counts, biases[0]), needs_biases)
    return gradients


def _multiply(x: Tensor, weights: list[Tensor], counts: Tensor, bias: Tensor | None, tail: Tensor | None) -> Tensor:
    """Multiply with weights ``[K, N]`` that are all contiguous or all transposed views, and add a bias ``[E, N]``."""
    if x.dtype is torch.float32:
        return gmm.multiply(x, torch.stack(weights), counts, bias, tail)
    if tail is not None:
        with unseen_by_checkpoints():
            return _multiply(x, weights, counts, bias, None).masked_fill_(tail, 0)
    y = gmm.multiply(x, weights[:MOST_LISTED], counts[:MOST_LISTED], None if bias is None else bias[:MOST_LISTED])
    if len(weights) > MOST_LISTED:
        rows = torch.arange(x.shape[0], device=x.device)
    for start in range(MOST_LISTED, len(weights), MOST_LISTED):
        part = slice(start, start + MOST_LISTED)
        before = counts[:start].sum()
        moved = x.index_select(0, (rows + before).clamp(max=x.shape[0] - 1))
        further = gmm.multiply(moved, weights[part], counts[part], None if bias is None else bias[part])
        # what follows the rows of these groups is not written yet: it belongs to later ones, or to the tail
        further = further.index_select(0, (rows - before).clamp(min=0))
        y = torch.where((rows >= before).unsqueeze(-1), further, y)
    return y


def _split(parameters: Sequence, has_bias: bool) -> tuple[list, list]:
    """Split parameters, or what is said of each of them, into those of weights and of biases."""
    number = len(parameters) // 2 if has_bias else len(parameters)
    return list(parameters[:number]), list(parameters[number:])


def _matrices(weights: list[Tensor], experts: int, transposed: bool) -> list[Tensor]:
    """Return the matrix of each expert: its weight, together with the other one that lies behind it if it has two."""
    matrices = weights[:experts]
    if len(weights) > experts:
        matrices = [joined(a, b) for a, b in zip(matrices, weights[experts:])]
    return [matrix.t() for matrix in matrices] if transposed else matrices


def _stack(parameters: list[Tensor], experts: int) -> Tensor:
    """Copy E parameters ``[N, ...]``, or E and E others that go below them, into one tensor ``[E, P·N, ...]``."""
    return torch.stack(parameters).unflatten(0, (-1, experts)).transpose(0, 1).flatten(1, 2)


def _part_gradients(gradient: Tensor, needs: list[bool]) -> list[Tensor | None]:
    """Split a gradient ``[E, P·N, ...]`` into a view for each of the E·P parameters, or None where it needs none."""
    experts = gradient.shape[0]
    halves = gradient.chunk(len(needs) // experts, 1)
    parts = [part for half in halves for part in half.unbind()]
    return [part if needed else None for part, needed in zip(parts, needs)]
