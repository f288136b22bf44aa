"""The product that a linear layer is, and the gradient of its input; weights are frozen, and have none.

A weight may be quantised. Then a product makes it, in the forward and again in the backward, and nothing keeps what was
made but a forward that is computed again, for the backward that follows at once. It may be of another dtype than the
input: that is cast to multiply, and what comes out is cast back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import checkpoint

_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


class QuantizedWeight(NamedTuple):
    """A frozen weight in few bits, which products make when they need it.

    Attributes:
        packed: what lies in memory, of any shape and dtype.
        dequantize: takes ``packed`` and returns the weight ``[N, H]``; or writes it into a contiguous second argument.
        shape: ``[N, H]``.
        dtype: what ``dequantize`` makes, in which the layer multiplies.
    """

    packed: Tensor
    dequantize: Callable[..., Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.packed.device

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained, which it never is."""
        return False


Weight = Tensor | QuantizedWeight


def as_stored(weight: Weight) -> Tensor:
    """Return the tensor that a node of autograd keeps for a weight."""
    return weight.packed if isinstance(weight, QuantizedWeight) else weight


def formats(weights: Sequence[Weight]) -> list[QuantizedWeight | None]:
    """Return what a node keeps beside the tensors of some weights: how those are made that are quantised."""
    return [weight if isinstance(weight, QuantizedWeight) else None for weight in weights]


def from_stored(stored: Sequence[Tensor], kept: Sequence[QuantizedWeight | None]) -> list[Weight]:
    """Return weights from what :func:`as_stored` and :func:`formats` gave of them."""
    return [tensor if how is None else how._replace(packed=tensor) for tensor, how in zip(stored, kept)]


def made_if_checkpointed(weights: Sequence[Weight]) -> list[Weight]:
    """Return the weights of one input that a node multiplies with and keeps.

    Quantised ones are made under ``torch.utils.checkpoint``: what is kept the first time is dropped, and what is kept
    when the forward is computed again lives for the backward of a layer, which need not make it once more.
    """
    quantised = [weight for weight in weights if isinstance(weight, QuantizedWeight)]
    are_alike = len(quantised) == len(weights) and len({weight.dtype for weight in quantised}) == 1
    if not (are_alike and _is_checkpointed()):
        return list(weights)
    return list(made_as_one(quantised).split([weight.shape[0] for weight in quantised]))


def made_as_one(weights: Sequence[QuantizedWeight]) -> Tensor:
    """Make quantised weights ``[N, H]`` of one dtype as the rows of one matrix ``[ΣN, H]``."""
    rows, like = [weight.shape[0] for weight in weights], weights[0]
    made = torch.empty(sum(rows), like.shape[1], dtype=like.dtype, device=like.device)
    for weight, part in zip(weights, made.split(rows)):
        weight.dequantize(weight.packed, part)
    return made


def _is_checkpointed() -> bool:
    """Tell whether what nodes keep is dropped, or this is a forward within a backward; torch before 2.8 cannot say."""
    if _top_hooks is None or torch.compiler.is_compiling():
        return False
    hooks = _top_hooks(True)
    return torch._C._current_graph_task_id() != -1 if hooks is None else hooks[0].__module__ == checkpoint.__name__


def as_matrix(weight: Weight) -> Tensor:
    """Return a weight as a matrix ``[N, H]``, which is made where it is quantised."""
    return weight.dequantize(weight.packed) if isinstance(weight, QuantizedWeight) else weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """Compute ``x @ weightᵀ + bias`` in the dtype of the weight, and return it in that of ``x``, or in another one.

    It is no view: autograd lets nobody write to a view that a node of ours gives.
    """
    dtype, x, weight = dtype or x.dtype, x.to(weight.dtype), as_matrix(weight)
    y = F.linear(x, weight, bias)
    if y.dtype is not dtype:
        return y.to(dtype)
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def flatten_tokens(x: Tensor) -> Tensor:
    """View, or copy, a tensor ``[..., H]`` as a matrix ``[T, H]``."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def linear_input_gradient(grad: Tensor, weight: Weight) -> Tensor:
    """Compute ``grad @ weight`` in the dtype of the weight, and return it in that of the gradient."""
    dtype, grad, weight = grad.dtype, grad.to(weight.dtype), as_matrix(weight)
    d_x = grad @ weight
    return d_x.to(dtype)


def shared_input_gradient(grads: Sequence[Tensor], weights: Sequence[Weight]) -> Tensor:
    """Compute ``Σ grad @ weight``, the gradient of an input that several layers share.

    Gradients and weights are laid side by side where that moves less than adding up one product for each: then it is
    one product, which adds up in float32 and is rounded once. Quantised weights are made one by one.

    Args:
        grads: ``[T, N]`` for each layer.
        weights: ``[N, H]`` each.
    """
    matrices = [weight for weight in weights if isinstance(weight, Tensor) and weight.dtype is grads[0].dtype]
    if len(matrices) == len(weights) > 1 and _is_less_to_join(grads, matrices):
        return torch.cat(tuple(grads), 1) @ torch.cat(tuple(matrices))
    total = linear_input_gradient(grads[0], weights[0])
    for grad, weight in zip(grads[1:], weights[1:]):
        total.add_(linear_input_gradient(grad, weight))
    return total


def _is_less_to_join(grads: Sequence[Tensor], weights: Sequence[Tensor]) -> bool:
    """Tell whether laying gradients and weights side by side moves less than going one by one.

    In numbers: joined, every gradient and every weight is read and written once more. One by one, for every weight but
    the first a gradient of the input is written, both are read and their sum is written.
    """
    tokens, size = grads[0].shape[0], weights[0].shape[1]
    outputs = sum(weight.shape[0] for weight in weights)
    return 4 * (len(weights) - 1) * tokens * size >= 2 * outputs * (tokens + size)
