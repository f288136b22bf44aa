"""Linear layers of compressed-tensors in int8 and int4, whose weights stay as they are and are multiplied so.

compressed-tensors keeps them in few bits while a checkpoint is loaded, and makes all of them wide in the first forward,
by a hook of the model. Layers that are served are none of its own meanwhile: it sees no scheme at them. All of a model
are served or none, since what it saves says of all alike how they are kept.

A layer keeps its tensors. Numbers that compressed-tensors packs into int32 are unsigned there, and signed in the
operator: their sign bits are turned where they lie, and turned back in what ``state_dict`` gives.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.devices import awaits_weights
from kernels_ext_npu.binding.loaded_kernels import forward_owner, set_forward
from kernels_ext_npu.catalogue import PROJECTIONS
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View
from kernels_ext_npu.swaps.linear.plain_linear import COMPRESSED, WRAPPED, qualified_name

REPOSITORY = "Linear"
NAME = "quantised_linear"
_LIBRARY = "compressed_tensors"
_HELD = "_kernels_ext_npu_compressed"  # attribute of a served layer: what is known of it
_COMPRESSOR = "_kernels_ext_npu_compressor"  # attribute of a model whose hook was taken out: what makes it again
_HOOK = "ct_decompress_hook"  # attribute of a model that the first forward makes wide
_PACKED = "weight_packed"
_OFFSET = "_kernels_ext_npu_offset"  # buffer of a served layer that has zero points: these, with a minus
_SIGN_BITS = {4: -0x77777778, 8: -0x7F7F7F80}  # 0x88888888 and 0x80808080: of each number in one of int32
_AS_IT_LIES = ("int-quantized", "naive-quantized")
_IN_INT32 = "pack-quantized"
_FORWARD = os.path.join("compressed_tensors", "quantization", "lifecycle", "forward.py")


class Held:
    """What compressed-tensors says of a layer that is served, which no pickle takes along."""

    def __init__(self, scheme: Any, status: Any) -> None:
        self.scheme, self.status = scheme, status
        self.bits: int = scheme.weights.num_bits
        self.group_size: int = scheme.weights.group_size or 0
        self.is_packed: bool = scheme.format == _IN_INT32
        self.rounds_input = scheme.input_activations is not None
        self.has_zero_points = not scheme.weights.symmetric

    def __deepcopy__(self, memo: dict) -> Held:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a layer of compressed-tensors that a kernel computes is not pickled: restore(model) first")


def find(view: View) -> list[Decision]:
    """Decide of every layer that compressed-tensors keeps in few bits."""
    found: list[Decision] = []
    if not (known := schemes(view)):
        return found
    has_hook = bool(_models_with(view, _HOOK) or _models_with(view, _COMPRESSOR))
    reasons = {module: _refusal(module, scheme, has_hook) for module, scheme in known.items()}
    refused = next(filter(None, reasons.values()), None)
    for path, module in view.named:
        if module in known:
            reason = reasons[module] or (
                refused and Reason("another", f"another layer of the model is kept: {refused}")
            )
            present = NAME if forward_owner(module) == COMPRESSED else None
            found.append(Decision(path, module, NAME, reason, present, kind=PROJECTIONS, is_candidate=False))
    return found


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Take layers over from compressed-tensors, or give all of them back."""
    decisions = list(decisions)
    if any(decision.reason is not None for decision in decisions):
        revert(view)
        return
    for model in _models_with(view, _HOOK) if decisions else ():
        hook = model._forward_pre_hooks[vars(model)[_HOOK].id]
        compressor = inspect.getclosurevars(hook).nonlocals["self"]
        # where the hook is about to run all the same, in the call that swaps kernels in, and where a save adds it again
        compressor.decompress_model = compressor.remove_decompression_hook
        compressor.remove_decompression_hook(model)
        setattr(model, _COMPRESSOR, compressor)
    for decision in decisions:
        if forward_owner(decision.module) != COMPRESSED:
            _take(decision.module)
            set_forward(decision.module, _forward_with(registration.package(REPOSITORY)), COMPRESSED)


def revert(view: View) -> None:
    """Give layers back to compressed-tensors, which makes them wide in the next forward; those of a part at once."""
    layers = view.owned(COMPRESSED)
    if not layers:
        return
    from compressed_tensors.compressors import decompress_module
    from compressed_tensors.quantization import QuantizationStatus

    for module in layers:
        _give_back(module)
    waits = False
    for model in _models_with(view, _COMPRESSOR):
        compressor = vars(model).pop(_COMPRESSOR)
        vars(compressor).pop("decompress_model", None)
        status = {vars(part).get("quantization_status") for part in model.modules()}
        if QuantizationStatus.DECOMPRESSED not in status:
            compressor.add_decompress_hook(model)
            waits = True
    for module in layers if not waits else ():
        decompress_module(module)


def remarks(view: View, served: list[Decision]) -> dict[Decision, str]:
    """Say how the weights of served layers are kept, and where one is made in each call."""
    return {decision: _kept(decision.module) for decision in served if decision.present == NAME}


def _kept(module: Any) -> str:
    held: Held = vars(module)[_HELD]
    groups = f" in groups of {held.group_size}" if held.group_size else ""
    groups += " with zero points" * held.has_zero_points
    kept = f"int{held.bits}{groups}{', and its input' * held.rounds_input}"
    if held.group_size % 32:
        return f"{kept}, made wide in each call: the operator takes groups of 32, 64 and so on"
    if held.bits == 4 and module.in_features % 8:
        return f"{kept}, made wide in each call: {module.in_features} columns are no whole numbers of int32"
    return kept


def schemes(view: View) -> dict[nn.Module, Any]:
    """Return the layers that compressed-tensors keeps in few bits, or did until a kernel took them, and how."""
    if _LIBRARY not in sys.modules:
        return {}
    return {module: scheme for _, module in view.named if (scheme := _scheme(module)) is not None}


def _scheme(module: nn.Module) -> Any:
    """Return the scheme of a layer in few bits, also of one that is served; None of any other."""
    members = vars(module)
    if _HELD in members:
        return members[_HELD].scheme
    scheme = members.get("quantization_scheme")
    is_kept = members.get("quantization_status") == "compressed"
    return scheme if is_kept and getattr(scheme, "weights", None) is not None else None


def _models_with(view: View, attribute: str) -> list[nn.Module]:
    """Return the models with the hook that makes them wide in their first forward, or with what makes it again."""
    return [module for _, module in view.named if attribute in vars(module)]


def _refusal(module: Any, scheme: Any, has_hook: bool) -> str | None:
    """Return why compressed-tensors computes a layer; None if a kernel can."""
    if (reason := refusals.unwanted(module, REPOSITORY) or refusals.elsewhere(module)) is not None:
        return reason
    weights, inputs = scheme.weights, scheme.input_activations
    if type(module) is not nn.Linear:
        return Reason("class", f"it is a {qualified_name(type(module))}: the kernel is for linear layers")
    if weights.type != "int" or weights.num_bits not in (4, 8):
        numbers = f"{getattr(weights.type, 'value', weights.type)} of {weights.num_bits} bits"
        return Reason("format", f"its weight is {numbers}: the kernel takes int8 and int4")
    if weights.strategy not in ("channel", "group") or "weight_g_idx" in module._parameters:
        return Reason("scales", "its scales are not those of rows, or of groups of neighbours in them")
    if scheme.output_activations is not None or not (inputs is None or _is_by_token(inputs, weights)):
        return Reason("activations", "its input or output is quantised other than by row to int8, when it is called")
    is_packed = scheme.format == _IN_INT32 and _PACKED in module._parameters
    if not (is_packed or (scheme.format in _AS_IT_LIES and weights.num_bits == 8)):
        return Reason("layout", "its weight lies as no release of compressed-tensors that was read lays it")
    if any(isinstance(tensor, DTensor) for tensor in module._parameters.values()):
        return Reason("sharded", "its weight is sharded")
    if awaits_weights():
        return Reason("meta", "its weight is on meta: once it is loaded kernelize(model) looks again")
    code = getattr(getattr(vars(module).get("forward"), "__func__", None), "__code__", None)
    if forward_owner(module) != COMPRESSED and (code is None or not code.co_filename.endswith(_FORWARD)):
        return WRAPPED
    if not has_hook:
        return Reason("part", "the first forward of the model around it makes it wide: kernelize that model")
    return None


def _is_by_token(inputs: Any, weights: Any) -> bool:
    """Tell whether rows are rounded to int8 by their largest, beside a weight with a scale for each of its rows."""
    is_int8 = inputs.type == "int" and inputs.num_bits == 8 and inputs.symmetric and inputs.dynamic is True
    by_row = weights.num_bits == 8 and weights.symmetric and weights.strategy == "channel"
    return is_int8 and inputs.strategy == "token" and by_row


def _take(module: Any) -> None:
    """Take a layer over: compressed-tensors sees no scheme, and numbers in int32 become signed."""
    held = Held(module.quantization_scheme, module.quantization_status)
    vars(module)[_HELD] = held
    del module.quantization_scheme, module.quantization_status, module.forward
    if held.has_zero_points:
        offset = _offset(module._parameters["weight_zero_point"].detach(), module._parameters["weight_scale"], held)
        module.register_buffer(_OFFSET, offset, persistent=False)
    if held.is_packed:
        _turn_signs(module._parameters[_PACKED], held.bits)
    if _publish not in module._state_dict_hooks.values():  # once, since what was given back keeps it
        module.register_state_dict_post_hook(_publish)
        module.register_load_state_dict_pre_hook(_take_in)


def _give_back(module: Any) -> None:
    from compressed_tensors.quantization.lifecycle.forward import set_forward_quantized

    held: Held = vars(module).pop(_HELD)
    module._buffers.pop(_OFFSET, None)
    module._non_persistent_buffers_set.discard(_OFFSET)
    if held.is_packed:
        _turn_signs(module._parameters[_PACKED], held.bits)
    module.quantization_scheme, module.quantization_status = held.scheme, held.status
    set_forward(module, None, COMPRESSED)
    set_forward_quantized(module)


def _offset(zero_points: Tensor, scale: Tensor, held: Held) -> Tensor:
    """Return what the kernel adds to the numbers of each row or group: their zero point with a minus."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    if held.is_packed:
        zero_points = unpack_from_int32(zero_points, held.bits, scale.shape, packed_dim=0)
    return -zero_points.to(scale.dtype)


def _turn_signs(packed: Tensor, bits: int) -> None:
    packed.detach().bitwise_xor_(_SIGN_BITS[bits])


def _publish(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give a state the numbers as a checkpoint has them."""
    if (held := vars(module).get(_HELD)) is not None and held.is_packed:
        state[prefix + _PACKED] = state[prefix + _PACKED].detach() ^ _SIGN_BITS[held.bits]


def _take_in(module: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    """Take numbers of a state as the kernel has them."""
    if (held := vars(module).get(_HELD)) is None:
        return
    if prefix + _PACKED in state:
        state[prefix + _PACKED] = state[prefix + _PACKED] ^ _SIGN_BITS[held.bits]
    if held.has_zero_points and (zero_points := state.get(f"{prefix}weight_zero_point")) is not None:
        scale: Any = module._parameters["weight_scale"]
        module._buffers[_OFFSET].copy_(_offset(zero_points, scale, held))  # type: ignore[union-attr]


@functools.cache
def _forward_with(kernel: ModuleType) -> FunctionType:
    """Return the forward of a layer in few bits."""
    compute = kernel.quantised_linear

    def forward(self: Any, input: Tensor) -> Tensor:
        held, tensors = self.__dict__[_HELD], self._parameters
        weight = tensors[_PACKED if held.is_packed else "weight"]
        if held.is_packed and held.bits == 8:
            weight = weight.view(torch.int8)[:, : self.in_features]
        return compute(
            input,
            weight,
            tensors["weight_scale"],
            tensors["bias"],
            held.group_size,
            offset=self._buffers.get(_OFFSET),
            rounds_input=held.rounds_input,
        )

    return forward  # type: ignore[return-value]


FINDER = Finder("layers of compressed-tensors", find, put, revert=revert, remarks=remarks)
