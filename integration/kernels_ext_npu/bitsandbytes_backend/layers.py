"""bitsandbytes' linear layers, whose weights in four or eight bits a kernel makes when it multiplies.

What they are is looked at in every call, as plain layers are: bitsandbytes quantises when a layer is moved, and learns
the dtype in which a layer of four bits computes from its first input.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from kernels_ext_npu.bitsandbytes_backend import four_bit, registration
from kernels_ext_npu.module_state import TORCH_CALL, has_hooks
from kernels_ext_npu.reasons import Reason

_IN_EIGHT_BITS = "Linear8bitLt"  # the class of such layers; all others are in four
_NOT_YET = Reason("not quantised", "its weight is not quantised yet")
_NESTED = 256  # scales in eight bits share one, as bitsandbytes makes them and multiplies


def why_not_made(layer: Any, is_sharded: bool = False) -> Reason | None:
    """Return why a kernel cannot make the weight of a quantised layer; None if it can.

    Args:
        layer: one of bitsandbytes', whose forward nobody has wrapped.
        is_sharded: whether a DTensor will do, which FSDP2 makes plain while the model is called.
    """
    if not registration.is_registered():
        return Reason("operators", "bitsandbytes has no operators for the NPU: it was imported before torch_npu")
    if type(layer).__call__ is not TORCH_CALL or type(layer).forward.__module__ != type(layer).__module__:
        return Reason("replaced", "the forward of bitsandbytes' layers was replaced")
    if has_hooks(layer):
        return Reason("hooks", "hooks watch its calls")
    parameter = layer._parameters.get("weight")
    if parameter is None or hasattr(parameter, "_fsdp_flattened"):
        return Reason("flattened", "its weight is a part of another tensor, as under FSDP1")
    if isinstance(parameter, DTensor) and not is_sharded:
        return Reason("sharded", "its weight is sharded, and nobody has gathered it")
    if type(layer).__name__ != _IN_EIGHT_BITS:
        state = _state(layer)
        if state is None:
            return _NOT_YET
        if tuple(state.shape) != (layer.out_features, layer.in_features):
            return Reason("transposed", "its weight was quantised transposed")
        if state.nested and state.state2.blocksize != _NESTED:
            return Reason("scales", f"its scales share one by {state.state2.blocksize}, which bitsandbytes refuses")
        return None
    if layer.state.has_fp16_weights:
        return Reason("wide", "its weight is kept in 16 bits, and quantised in each call")
    if not layer.training:
        return Reason("int8", "outside of training bitsandbytes multiplies in int8")
    return _NOT_YET if _bytes_and_scales(layer)[1] is None else None


def weight(layer: Any, dtype: torch.dtype, kernel: ModuleType) -> Any:
    """Return the weight of a quantised layer as the kernel takes it, which multiplies in the dtype that the layer says.

    Args:
        dtype: of the input, in which a layer computes that says nothing.
    """
    shape = (layer.out_features, layer.in_features)
    if type(layer).__name__ == _IN_EIGHT_BITS:
        packed, scales = _bytes_and_scales(layer)
        assert scales is not None  # why_not_made looks
        return kernel.QuantizedWeight(packed, functools.partial(_from_bytes, scales, dtype), shape, dtype)
    is_told = layer.compute_type_is_set or dtype is torch.float16  # otherwise its first input will tell it
    computed = layer.compute_dtype or dtype if is_told else dtype
    with torch._C.DisableTorchFunctionSubclass():
        packed = layer._parameters["weight"].detach()
    return kernel.QuantizedWeight(packed, functools.partial(_from_four_bits, _state(layer), computed), shape, computed)


def _state(layer: Any) -> Any:
    """Return what is known of a weight in four bits: the layer has it, too, where FSDP has replaced the parameter."""
    found = getattr(layer._parameters["weight"], "quant_state", None)
    return layer.quant_state if found is None else found


def _bytes_and_scales(layer: Any) -> tuple[Tensor, Tensor | None]:
    """Return an int8 weight ``[N, H]`` and its scales ``[N]``, which the layer takes from its parameter when called."""
    parameter = layer._parameters["weight"]
    if parameter.CB is not None:
        return parameter.CB, parameter.SCB
    return parameter if layer.state.CB is None else layer.state.CB, layer.state.SCB


def _from_four_bits(state: Any, dtype: torch.dtype, packed: Tensor, out: Tensor | None = None) -> Tensor:
    """Make a weight in four bits, as ``bitsandbytes.functional.dequantize_4bit`` does."""
    scales = state.absmax
    if state.nested:
        nested = state.state2
        scales = four_bit.dequantize_blockwise(scales, nested.absmax, nested.code, _NESTED, torch.float32)
        scales += state.offset
    values = four_bit.scaled_values(packed, scales, state.blocksize, state.quant_type, state.shape)
    return values.to(dtype) if out is None else out.copy_(values)


def _from_bytes(scales: Tensor, dtype: torch.dtype, packed: Tensor, out: Tensor | None = None) -> Tensor:
    """Make a weight in eight bits, as ``bitsandbytes.autograd._functions.MatMul8bitFp`` does, its formula to train."""
    values = packed.to(dtype) * scales.unsqueeze(1).mul(1.0 / 127.0)
    return values.to(dtype) if out is None else out.copy_(values)
