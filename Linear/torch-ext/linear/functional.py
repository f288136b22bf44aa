"""Linear layers as functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from . import adapted_together, dropped_together
from ._common.adjacent_storage import are_neighbours
from ._common.checkpoints import unseen_by_checkpoints
from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .adapted import AdaptedLinear, outputs_of
from .adapted_pair import AdaptedPair, pair_of
from .adapted_together import AdaptedLinears
from .adapters import Adapter, in_torch, input_of
from .alone import Linear
from .dropped_together import DroppedLinears
from .several import Linears

_ADAPTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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


def linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
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
    if len(weights) < 2 or not all(is_trained(x, weight) for weight in weights):
        return tuple([linear(x, weight, bias) for weight, bias in zip(weights, biases)])
    if torch.is_autocast_enabled("npu"):
        dtype = torch.get_autocast_dtype("npu")
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
        biases = [None if bias is None else bias.to(dtype) for bias in biases]
    return Linears.apply(x, len(weights), *weights, *biases)


def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, adapters: Sequence[Adapter]) -> Tensor:
    """Compute ``x @ weightᵀ + bias + Σ scale * x_i @ aᵀ @ bᵀ``, a frozen linear layer with adapters of low rank.

    On the NPU it is one node of autograd, which applies the scale of an adapter to what its first factor gives. An
    adapter may be float32 beside a layer of 16 bits: then its products are, and what it drops is dropped from float32.
    Under ``torch.compile``, torch.func and forward-mode derivatives, for DTensors, and where the weight needs a
    gradient, it is the same formula in torch. Under autocast all are of its dtype. Differentiable as often as one
    likes.

    Args:
        x: ``[..., H]``, of a floating dtype.
        weight: ``[N, H]``, of the same dtype.
        bias: ``[N]``, of the same dtype, or None.
        adapters: one or more, each with an input of its own, or that of the layer, of which it may drop elements. Masks
            are drawn in this order.

    Returns:
        ``[..., N]``, of the dtype of ``x``, or of autocast.

    Raises:
        TypeError: ``x`` is not floating point.
        RuntimeError: what ``torch.nn.functional.linear`` says of tensors that do not fit.
    """
    if x.device.type == "npu" and torch.is_autocast_enabled("npu"):
        adapters = [_adapter_for_autocast(adapter, x) for adapter in adapters]
        x, weight, bias = [_for_autocast(tensor) for tensor in (x, weight, bias)]  # type: ignore[assignment]
    if not _is_adapted(x, weight, adapters):
        if not x.is_floating_point():
            raise TypeError(f"lora_linear: x must be floating point, got {x.dtype}")
        return in_torch(x, weight, bias, *adapters)
    if len(adapters) == 1 and adapters[0].p and adapters[0].x is None:
        return _dropped(x, [(weight, bias, adapters[0])])[0]
    scales = tuple([adapter.scale for adapter in adapters])
    tensors = [tensor for adapter in adapters for tensor in (input_of(adapter, x), adapter.a, adapter.b)]
    if not _is_differentiated(x, bias, *tensors):
        return outputs_of(scales, x, weight, bias, *tensors)[0]
    with unseen_by_checkpoints():
        return AdaptedLinear.apply(scales, x, weight, bias, *tensors)


def lora_linears(x: Tensor, layers: Sequence[tuple[Tensor, Tensor | None, Adapter]]) -> tuple[Tensor, ...]:
    """Compute :func:`lora_linear` for several layers of one input, each with one adapter, as one node of autograd.

    The first products of the adapters are one, and so are most of what their gradients are made of. Where they drop
    elements of the input, each others, their products are apart; the input is cast and kept once.

    Args:
        x: ``[..., H]``, of a floating dtype.
        layers: for each of them its weight, its bias or None, and its adapter. Adapters that have an input of their
            own, differ in dtype, or of which only some drop elements are computed one by one. Masks are drawn in this
            order.

    Returns:
        ``[..., N]`` for each layer, of the dtype of ``x``, or of autocast.

    Raises:
        TypeError: ``x`` is not floating point.
        RuntimeError: what ``torch.nn.functional.linear`` says of tensors that do not fit.
    """
    if x.device.type == "npu" and torch.is_autocast_enabled("npu"):
        layers = [(_for_autocast(w), _for_autocast(bias), _adapter_for_autocast(a, x)) for w, bias, a in layers]  # type: ignore[misc]
        x = _for_autocast(x)  # type: ignore[assignment]
    adapters = [adapter for *_, adapter in layers]
    together = (
        len({(adapter.a.dtype, adapter.p > 0) for adapter in adapters}) == 1
        and all(adapter.x is None for adapter in adapters)
        and all(_is_adapted(x, weight, [adapter]) for weight, _, adapter in layers)
    )
    if not together:
        return tuple([lora_linear(x, weight, bias, [adapter]) for weight, bias, adapter in layers])
    if adapters[0].p:
        return _dropped(x, layers)
    tensors = [tensor for weight, bias, adapter in layers for tensor in (weight, bias, adapter.a, adapter.b)]
    scales = tuple([adapter.scale for adapter in adapters])
    if not _is_differentiated(x, *tensors):
        return adapted_together.outputs_of(scales, x, *tensors)[0]
    with unseen_by_checkpoints():
        return AdaptedLinears.apply(scales, x, *tensors)


def lora_pair(x: Tensor, layers: Sequence[tuple[Tensor, Tensor | None, Adapter]]) -> Tensor | None:
    """Compute what :func:`lora_linears` does of two layers, as one product and as one tensor.

    It moves less than that where both are multiplied with each other next, as gate and up of an MLP are by an operator
    that takes one tensor.

    Args:
        x: ``[..., H]``, of a floating dtype.
        layers: for each of the two its weight ``[N, H]``, None in the place of a bias, and its adapter.

    Returns:
        ``[..., 2·N]``, the first layer first, of the dtype of ``x``, or of autocast. None, with nothing computed, where
        that cannot be: the weights are no neighbours in memory, or the layers have biases, scales or dtypes that
        differ, drop elements of their input, or have one of their own, a weight needs a gradient, or there is no row.
    """
    (first, bias, one), (second, other_bias, other) = layers
    if x.device.type != "npu" or not (bias is other_bias is None and one.scale == other.scale):
        return None
    if one.p or other.p or one.x is not None or other.x is not None or one.a.dtype is not other.a.dtype:
        return None
    if not (first.shape == second.shape and first.dtype is second.dtype and first.device == second.device):
        return None
    if is_distributed(first, second) or not are_neighbours(first, second):
        return None
    factors = [tensor for adapter in (one, other) for tensor in (adapter.a, adapter.b)]
    if torch.is_autocast_enabled("npu"):
        dtype = torch.get_autocast_dtype("npu")
        if first.dtype is not dtype:  # a weight that is cast is no neighbour any more
            return None
        x, factors = x.to(dtype), [tensor.to(dtype) for tensor in factors]
    a, b, c, d = factors
    if not (_is_adapted(x, first, [Adapter(a, b, one.scale)]) and _is_adapted(x, second, [Adapter(c, d, one.scale)])):
        return None
    if not _is_differentiated(x, *factors):
        return pair_of(one.scale, x, first, a, b, second, c, d)[0]
    with unseen_by_checkpoints():
        return AdaptedPair.apply(one.scale, x, first, a, b, second, c, d)


def _dropped(x: Tensor, layers: Sequence[tuple[Tensor, Tensor | None, Adapter]]) -> tuple[Tensor, ...]:
    """Compute layers whose adapters drop elements of their one input; what is kept of it is that input, and masks."""
    factors = tuple([(adapter.scale, adapter.p) for *_, adapter in layers])
    tensors = [tensor for weight, bias, adapter in layers for tensor in (weight, bias, adapter.a, adapter.b)]
    if not _is_differentiated(x, *tensors):
        return dropped_together.outputs_of(factors, x, *tensors)[0]
    with unseen_by_checkpoints():
        return DroppedLinears.apply(factors, x, *tensors)


def _for_autocast(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.get_autocast_dtype("npu"))


def _adapter_for_autocast(adapter: Adapter, x: Tensor) -> Adapter:
    """Cast an adapter; where its input is not of autocast's dtype, elements of it are dropped before it is cast."""
    a, b, scale, own, p = adapter
    if x.dtype is not torch.get_autocast_dtype("npu"):
        own = input_of(adapter, x)
    return Adapter(_for_autocast(a), _for_autocast(b), scale, _for_autocast(own), p)  # type: ignore[arg-type]


def _is_adapted(x: Tensor, weight: Tensor, adapters: Sequence[Adapter]) -> bool:
    """Tell whether a layer with adapters is computed on the NPU with nothing in the way of a node of ours."""
    if torch.compiler.is_compiling():
        return False
    dtype, device = weight.dtype, weight.device
    return (
        device.type == "npu"
        and x.device == device
        and x.dtype is dtype
        and dtype in _ADAPTED_DTYPES
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and weight.shape[0] > 0
        and not (weight.requires_grad and torch.is_grad_enabled())
        and not is_transformed()
        and not is_distributed(x, weight)
        and all(_is_fitting(adapter, x, weight) for adapter in adapters)
    )


def _is_fitting(adapter: Adapter, x: Tensor, weight: Tensor) -> bool:
    a, b, _, own, p = adapter
    return (
        a.dtype is b.dtype
        and 0 <= p < 1
        and a.dtype in (weight.dtype, torch.float32)
        and a.device == b.device == weight.device
        and a.dim() == b.dim() == 2
        and a.shape[1] == weight.shape[1]
        and b.shape == (weight.shape[0], a.shape[0])
        and (own is None or (own.shape == x.shape and own.dtype in (x.dtype, a.dtype)))
        and not is_distributed(a, b, own)
    )


def _is_differentiated(*tensors: Tensor | None) -> bool:
    """Tell whether a gradient is asked for of one of the tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_trained(x: Tensor, weight: Tensor) -> bool:
    """Tell whether a product on the NPU needs a gradient of its weight, and nothing is in the way of a node of ours."""
    if weight.device.type != "npu" or torch.compiler.is_compiling():  # where there is none torch does not know its name
        return False
    dtype, autocast = weight.dtype, torch.is_autocast_enabled("npu")
    return (
        torch.is_grad_enabled()
        and weight.requires_grad
        and x.device == weight.device
        and weight.dim() == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and (x.dtype is dtype or autocast)
        and dtype.is_floating_point
        and not (autocast and (dtype is torch.float64 or x.dtype is torch.float64 or not x.is_floating_point()))
        and x.numel() > 0
        and weight.shape[0] > 0
        and not is_distributed(x, weight)
        and not is_transformed()
    )
