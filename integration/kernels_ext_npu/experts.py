"""The experts implementation ``npu_grouped_mm`` of transformers.

It is the forward of the layer `MoEExperts`, called by name. While kernels are registered, models that would take
transformers' default take it, on the NPU; on other devices it hands over to that default. Who names another
implementation gets that one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from kernels_ext_npu import implementation, sources
from kernels_ext_npu.implementation import NAME
from kernels_ext_npu.marking import device_of, kernel_forward
from kernels_ext_npu.matching import is_experts_class

LAYER = "MoEExperts"
Model = TypeVar("Model", bound=nn.Module)

_source: str | Path | None = None
_layer: type[nn.Module] | None = None


def npu_grouped_mm(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts implementation."""
    if hidden_states.device.type != "npu":
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return _loaded().forward(self, hidden_states, top_k_index, top_k_weights)


def install(source: str | Path) -> None:
    """Register the implementation, and let models take it that would take the default."""
    global _source
    _source = source
    ALL_EXPERTS_FUNCTIONS.register(NAME, npu_grouped_mm)
    _wrap("get_correct_experts_implementation", _get_correct)
    _wrap("set_experts_implementation", _set)


def remove() -> None:
    """Take the implementation out again, and give its models the default back."""
    global _source, _layer
    _source = _layer = None
    for name in ("get_correct_experts_implementation", "set_experts_implementation"):
        original = getattr(getattr(PreTrainedModel, name), "kernels_ext_npu", None)
        if original is not None:  # otherwise somebody has wrapped it since: then ours stays below, without effect
            setattr(PreTrainedModel, name, original)
    implementation.give_all_back()
    ALL_EXPERTS_FUNCTIONS._global_mapping.pop(NAME, None)  # register() has no counterpart


def choose(model: nn.Module) -> None:
    """Let a model that was loaded before take the implementation, unless another one was named.

    The kernel looks at the gates now: it could not while a graph is captured.
    """
    for module in _experts(model):
        implementation.choose(module.config)
        if implementation.named(module.config) is None:
            _try_to_load()
        if (kernel := _kernel(module)) is not None:
            _part(kernel, "gates").activation_of(module)


def restore(model: nn.Module) -> None:
    """Give a model the default and its weights' memory back."""
    for module in _experts(model):
        if (kernel := _kernel(module)) is not None:
            _part(kernel, "gates").forget(module)
            for weight in _weights(module):
                if weight.dim() == 3 and weight.mT.is_contiguous():
                    _part(kernel, "layout").store_contiguous(weight)
    for module in _experts(model):  # one config is that of many
        implementation.give_back(module.config)


def transpose_experts(model: Model) -> Model:
    """Store the weights of experts so that the forward multiplies with contiguous matrices.

    transformers stores most of them the other way around, and ``npu_grouped_matmul`` is given transposed views. Stored
    like this, the views fall to the gradient of the input: it suits inference and frozen experts, where it is faster,
    which the device at hand has to tell. Nothing is held twice: the parameters are moved, one after the other.
    restore(model) moves them back.

    Returns:
        The model itself.

    Raises:
        ValueError: no experts of the model are served by the kernel, or a weight cannot be moved.
    """
    served = [(module, kernel) for module in _experts(model) if (kernel := _kernel(module)) is not None]
    if not served:
        raise ValueError(
            "transpose_experts: the model has no experts with a kernel: load it with device_map='npu' after "
            "register(), and look at report(model)"
        )
    for module, kernel in served:
        for weight in _weights(module):
            if not module.is_transposed:
                _part(kernel, "layout").store_transposed(weight)
    return model


def is_called_by_name(module: nn.Module) -> bool:
    """Whether the forward of an experts module ends in this implementation, through the name in its config."""
    if _source is None or not is_experts_class(type(module)) or device_of(module) not in ("npu", None):
        return False
    return getattr(module.config, "_experts_implementation", None) == NAME


def remark(module: nn.Module) -> str | None:
    """What is not as fast as it could be in an experts module that is served."""
    kernel = _kernel(module) if is_experts_class(type(module)) else None
    gates = _part(kernel, "gates") if kernel else None
    if gates is None or isinstance(gates.activation_of(module), gates.Gate):
        return None
    return "what lies between its products is computed in torch: the kernel has SwiGLU and the clipped SwiGLU"


def _experts(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_experts_class(type(module))]


def _loaded() -> type[nn.Module]:
    global _layer
    if _layer is None:
        assert _source is not None
        _layer = sources.layer_source(_source, "FusedMoE", LAYER).load()
    return _layer


def _try_to_load() -> None:
    """While a graph is captured it would be too late. What is wrong is said when the kernel is needed, if it is."""
    with suppress(Exception):
        _loaded()


def _weights(module: Any) -> list[nn.Parameter]:
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]


def _kernel(module: nn.Module) -> str | None:
    """The package of the loaded kernel that serves an experts module."""
    function: Callable | None = kernel_forward(module)
    if function is None and _layer is not None and is_called_by_name(module):
        function = _layer.forward
    package = function.__module__.partition(".")[0] if function else None
    return package if f"{package}.experts" in sys.modules else None


def _part(package: str, name: str) -> ModuleType:
    """A module of a loaded kernel, whether or not the package knows it as an attribute."""
    return sys.modules[f"{package}.{name}"]


def _get_correct(original: Callable, self: PreTrainedModel, requested: str | None) -> str:
    chosen = implementation.note(self.config, requested, original(self, requested))
    if chosen == NAME:
        _try_to_load()
    return chosen


def _set(original: Callable, self: PreTrainedModel, requested: str | dict) -> None:
    """What `kernels` bound to a module does not look at its config, and makes room for what was asked for."""
    original(self, requested)
    for module in _experts(self):
        function = kernel_forward(module)
        if implementation.named(module.config) is None or function is None:
            continue
        if getattr(vars(module)["forward"], "__func__", None) is function:
            del module.forward
        else:  # in accelerate's wrapper
            module._old_forward = MethodType(type(module).forward, module)


def _wrap(name: str, replacement: Callable) -> None:
    original = getattr(PreTrainedModel, name)

    @functools.wraps(original)
    def wrapped(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if _source is None:
            return original(self, *args, **kwargs)
        return replacement(original, self, *args, **kwargs)

    wrapped.kernels_ext_npu = original  # type: ignore[attr-defined]
    setattr(PreTrainedModel, name, wrapped)
