"""Modules of experts: which implementation they take, how their weights lie, and what there is to say about them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from kernels_ext_npu.matching.lookup import is_experts_class
from kernels_ext_npu.swapping import experts_choice, experts_interface
from kernels_ext_npu.swapping.classes import device_of
from kernels_ext_npu.swapping.forwards import kernel_forward

Model = TypeVar("Model", bound=nn.Module)


def choose(model: nn.Module) -> None:
    """Let a model that was loaded before take the implementation, unless another one was named.

    The kernel looks at the gates now: it could not while a graph is captured.
    """
    for module in experts_of(model):
        experts_choice.choose(module.config)
        if experts_choice.named(module.config) is None:
            experts_interface.try_to_load()
        if (kernel := _kernel(module)) is not None:
            _part(kernel, "gates").activation_of(module)


def restore(model: nn.Module) -> None:
    """Give a model the default and its weights' memory back."""
    for module in experts_of(model):
        if (kernel := _kernel(module)) is not None:
            _part(kernel, "gates").forget(module)
            for weight in _weights(module):
                if weight.dim() == 3 and weight.mT.is_contiguous():
                    _part(kernel, "layout").store_contiguous(weight)
    for module in experts_of(model):  # one config is that of many
        experts_choice.give_back(module.config)


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
    served = [(module, kernel) for module in experts_of(model) if (kernel := _kernel(module)) is not None]
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
    if not experts_interface.is_installed() or not is_experts_class(type(module)):
        return False
    if device_of(module) not in ("npu", None):
        return False
    return getattr(module.config, "_experts_implementation", None) == experts_choice.NAME


def remark(module: nn.Module) -> str | None:
    """What is not as fast as it could be in an experts module that is served."""
    kernel = _kernel(module) if is_experts_class(type(module)) else None
    gates = _part(kernel, "gates") if kernel else None
    if gates is None or isinstance(gates.activation_of(module), gates.Gate):
        return None
    return "what lies between its products is computed in torch: the kernel has SwiGLU and the clipped SwiGLU"


def experts_of(model: nn.Module) -> list[Any]:
    """The experts modules of a model."""
    return [module for module in model.modules() if is_experts_class(type(module))]


def _weights(module: Any) -> list[nn.Parameter]:
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "up_proj", "down_proj"))
    return [weight for weight in weights if isinstance(weight, nn.Parameter)]


def _kernel(module: nn.Module) -> str | None:
    """The package of the loaded kernel that serves an experts module."""
    function: Callable | None = kernel_forward(module)
    if function is None and experts_interface.is_loaded() and is_called_by_name(module):
        function = experts_interface.loaded().forward
    package = function.__module__.partition(".")[0] if function else None
    return package if f"{package}.gates" in sys.modules else None


def _part(package: str, name: str) -> ModuleType:
    """A module of a loaded kernel, whether or not the package knows it as an attribute."""
    return sys.modules[f"{package}.{name}"]
