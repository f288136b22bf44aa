"""Linear layers as functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._common.adjacent_storage import are_neighbours
from ._common.checkpoints import unseen_by_checkpoints
from ._common.derivatives import is_transformed, needs_grad
from ._common.distributed import is_distributed
from .adapters import Adapter, adapter_input, lora_reference
from .lora import LoraLinear, lora_forward
from .multi_lora import MultiLoraLinear, multi_lora_forward
from .paired_lora import PairedLoraLinear, paired_lora_forward
from .projections import QuantizedWeight, Weight, as_stored

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def lora_linear(x: Tensor, weight: Weight, bias: Tensor | None, adapters: Sequence[Adapter]) -> Tensor:
    """Compute ``x @ weightᵀ + bias + Σ scale * x_i @ aᵀ @ bᵀ``, a frozen linear layer with adapters of low rank.

    On the NPU it is one node of autograd, which applies the scale of an adapter to what its first factor gives. An
    adapter may be float32 beside a layer of 16 bits: then its products are, and what it drops is dropped from float32.
    Under ``torch.compile``, torch.func and forward-mode derivatives, for DTensors, and where the weight needs a
    gradient, it is the same formula in torch. Under autocast all are of its dtype. Gradients of the node have no
    derivative: to ask for one is an error that says so.

    Args:
        x: ``[..., H]``, of a floating dtype.
        weight: ``[N, H]``, of the same dtype; or a quantised one, of any of them.
        bias: ``[N]``, of the dtype of the weight, or None.
        adapters: one or more, each with an input of its own, or that of the layer, of which it may drop elements. Masks
            are drawn in this order.

    Returns:
        ``[..., N]``, of the dtype of ``x``, or of autocast; beside a quantised weight always of that of ``x``.

    Raises:
        TypeError: ``x`` is not floating point.
        RuntimeError: what ``torch.nn.functional.linear`` says of tensors that do not fit.
    """
    if x.device.type == "npu" and torch.is_autocast_enabled("npu"):
        adapters = [_adapter_for_autocast(adapter, x) for adapter in adapters]
        if isinstance(weight, Tensor):
            x, weight, bias = [_for_autocast(tensor) for tensor in (x, weight, bias)]  # type: ignore[assignment]
    if not _is_fused(x, weight, adapters):
        if not x.is_floating_point():
            raise TypeError(f"lora_linear: x must be floating point, got {x.dtype}")
        return lora_reference(x, weight, bias, *adapters)
    return _lora_linears(x, [(weight, bias, adapters)])[0]


def lora_linears(x: Tensor, layers: Sequence[tuple[Weight, Tensor | None, Adapter]]) -> tuple[Tensor, ...]:
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
        layers = [(weight, bias, _adapter_for_autocast(adapter, x)) for weight, bias, adapter in layers]
        if all(isinstance(weight, Tensor) for weight, *_ in layers):
            layers = [(_for_autocast(w), _for_autocast(bias), adapter) for w, bias, adapter in layers]  # type: ignore[misc, arg-type]
            x = _for_autocast(x)  # type: ignore[assignment]
    adapters = [adapter for *_, adapter in layers]
    together = (
        len({(adapter.a.dtype, adapter.p > 0) for adapter in adapters}) == 1
        and all(adapter.x is None for adapter in adapters)
        and len({weight.dtype for weight, *_ in layers}) == 1
        and all(_is_fused(x, weight, [adapter]) for weight, _, adapter in layers)
    )
    if not together:
        return tuple([lora_linear(x, weight, bias, [adapter]) for weight, bias, adapter in layers])
    if adapters[0].p:
        return _lora_linears(x, [(weight, bias, [adapter]) for weight, bias, adapter in layers])
    tensors = [tensor for weight, bias, adapter in layers for tensor in (weight, bias, adapter.a, adapter.b)]
    scales = tuple([adapter.scale for adapter in adapters])
    if not needs_grad(x, *tensors):
        return multi_lora_forward(scales, x, *tensors)[0]
    with unseen_by_checkpoints():
        return MultiLoraLinear.apply(scales, x, *tensors)


def lora_pair(x: Tensor, layers: Sequence[tuple[Weight, Tensor | None, Adapter]]) -> Tensor | None:
    """Compute what :func:`lora_linears` does of two layers, as one product and as one tensor.

    It moves less than that where both are multiplied with each other next, as gate and up of an MLP are by an operator
    that takes one tensor.

    Args:
        x: ``[..., H]``, of a floating dtype.
        layers: for each of the two its weight ``[N, H]``, None in the place of a bias, and its adapter.

    Returns:
        ``[..., 2·N]``, the first layer first, of the dtype of ``x``, or of autocast. None, with nothing computed, where
        that cannot be: the weights are neither neighbours in memory nor both quantised, or the layers have biases,
        scales or dtypes that differ, drop elements of their input, or have one of their own, a weight needs a gradient,
        or there is no row.
    """
    (first, bias, one), (second, other_bias, other) = layers
    if x.device.type != "npu" or not (bias is other_bias is None and one.scale == other.scale):
        return None
    if one.p or other.p or one.x is not None or other.x is not None or one.a.dtype is not other.a.dtype:
        return None
    if not (first.shape == second.shape and first.dtype is second.dtype and first.device == second.device):
        return None
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if is_distributed(first, second) or not are_neighbours(first, second):
            return None
    elif isinstance(first, Tensor) or isinstance(second, Tensor):
        return None
    factors = [tensor for adapter in (one, other) for tensor in (adapter.a, adapter.b)]
    if torch.is_autocast_enabled("npu"):
        dtype = torch.get_autocast_dtype("npu")
        if first.dtype is not dtype:  # a weight that is cast is no neighbour any more
            return None
        x, factors = x.to(dtype) if isinstance(first, Tensor) else x, [tensor.to(dtype) for tensor in factors]
    a, b, c, d = factors
    if not (_is_fused(x, first, [Adapter(a, b, one.scale)]) and _is_fused(x, second, [Adapter(c, d, one.scale)])):
        return None
    if not needs_grad(x, *factors):
        return paired_lora_forward(one.scale, x, first, a, b, second, c, d)[0]
    with unseen_by_checkpoints():
        return PairedLoraLinear.apply(one.scale, x, first, a, b, second, c, d)


def _lora_linears(x: Tensor, layers: Sequence[tuple[Weight, Tensor | None, Sequence[Adapter]]]) -> tuple[Tensor, ...]:
    """Compute layers of one input whose adapters have products of their own; what they drop is kept as masks."""
    weights, biases, groups = zip(*layers)
    options = tuple(
        [tuple([(each.scale, 0.0 if each.x is not None else each.p) for each in group]) for group in groups]
    )
    factors = [tensor for group in groups for each in group for tensor in (each.x, each.a, each.b)]
    tensors = *weights, *biases, *factors
    if not needs_grad(x, *tensors):
        return lora_forward(options, x, *tensors)[0]
    with unseen_by_checkpoints():
        return LoraLinear.apply(options, x, *tensors)


def _for_autocast(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.to(torch.get_autocast_dtype("npu"))


def _adapter_for_autocast(adapter: Adapter, x: Tensor) -> Adapter:
    """Cast an adapter; where its input is not of autocast's dtype, elements of it are dropped before it is cast."""
    a, b, scale, own, p = adapter
    if x.dtype is not torch.get_autocast_dtype("npu"):
        own = adapter_input(adapter, x)
    return Adapter(_for_autocast(a), _for_autocast(b), scale, _for_autocast(own), p)  # type: ignore[arg-type]


def _is_fused(x: Tensor, weight: Weight, adapters: Sequence[Adapter]) -> bool:
    """Tell whether a layer with adapters is computed on the NPU with nothing in the way of a node of ours."""
    if torch.compiler.is_compiling():
        return False
    dtype, device = weight.dtype, weight.device
    return (
        device.type == "npu"
        and x.device == device
        and (x.dtype is dtype or (x.dtype in _FUSED_DTYPES and isinstance(weight, QuantizedWeight)))
        and dtype in _FUSED_DTYPES
        and len(weight.shape) == 2
        and x.dim() > 0
        and x.shape[-1] == weight.shape[1]
        and x.numel() > 0
        and weight.shape[0] > 0
        and not (weight.requires_grad and torch.is_grad_enabled())
        and not is_transformed()
        and not is_distributed(x, as_stored(weight))
        and all(_is_adapter_fused(adapter, x, weight) for adapter in adapters)
    )


def _is_adapter_fused(adapter: Adapter, x: Tensor, weight: Weight) -> bool:
    a, b, _, own, p = adapter
    return (
        a.dtype is b.dtype
        and 0 <= p < 1
        and a.dtype in (x.dtype, weight.dtype, torch.float32)
        and a.device == b.device == weight.device
        and a.dim() == b.dim() == 2
        and a.shape[1] == weight.shape[1]
        and b.shape == (weight.shape[0], a.shape[0])
        and (own is None or (own.shape == x.shape and own.dtype in (x.dtype, a.dtype)))
        and not is_distributed(a, b, own)
    )
