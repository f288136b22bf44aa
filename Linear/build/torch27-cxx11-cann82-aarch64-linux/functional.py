"""Linear layers as functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from .alone import Linear
from .distributed import is_distributed
from .several import Linears
from .transforms import is_transformed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weightᵀ + bias``, with a gradient of the weight that lies as the weight does.

    On the NPU autograd takes that gradient as it is, where it copies the one that torch_npu gives. Without a gradient
    of the weight, on other devices, under ``torch.compile``, torch.func and forward-mode derivatives, and for DTensors
    it is ``torch.nn.functional.linear``. Autocast casts what it casts for that. Differentiable as often as one likes.

    Args:
        x: ``[..., H]``, of a floating dtype.
        weight: ``[N, H]``, of the same dtype.
        bias: ``[N]``, of the same dtype, or None.

    Returns:
        ``[..., N]``.

    Raises:
        RuntimeError: what ``torch.nn.functional.linear`` says of tensors that do not fit.
    """
    if not is_trained(x, weight):
        return F.linear(x, weight, bias)
    if torch.is_autocast_enabled("npu"):
        dtype = torch.get_autocast_dtype("npu")
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return Linear.apply(x, weight, bias)


def linears(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """Compute ``x @ weightᵀ + bias`` for several weights, such as those of queries, keys and values.

    As :func:`linear`, and all are one node of autograd: the gradients of ``x`` are added up in a product, in float32,
    where laying gradients and weights side by side moves less than adding one gradient to another.

    Args:
        x: ``[..., H]``, of a floating dtype.
        weights: ``[N, H]`` each, of the same dtype, with an N of its own.
        biases: ``[N]`` or None for each of them; by default none has one.

    Returns:
        ``[..., N]`` for each weight.

    Raises:
        ValueError: there are not as many biases as weights.
        RuntimeError: what ``torch.nn.functional.linear`` says of tensors that do not fit.
    """
    biases = (None,) * len(weights) if biases is None else biases
    if len(biases) != len(weights):
        raise ValueError(f"linears: {len(weights)} weights need as many biases, got {len(biases)}")
    if len(weights) < 2 or not all([is_trained(x, weight) for weight in weights]):
        return tuple([linear(x, weight, bias) for weight, bias in zip(weights, biases)])
    if torch.is_autocast_enabled("npu"):
        dtype = torch.get_autocast_dtype("npu")
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
        biases = [None if bias is None else bias.to(dtype) for bias in biases]
    return Linears.apply(x, len(weights), *weights, *biases)


def is_trained(x: Tensor, weight: Tensor) -> bool:
    """Tell whether a product on the NPU needs a gradient of its weight, and nothing is in the way of a node of ours."""
    dtype, autocast = weight.dtype, torch.is_autocast_enabled("npu")
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and weight.device.type == "npu"
        and x.device == weight.device
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and (x.dtype is dtype or autocast)
        and dtype.is_floating_point
        and not (autocast and (dtype is torch.float64 or x.dtype is torch.float64 or not x.is_floating_point()))
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not is_distributed(x, weight)
        and not is_transformed()
    )
