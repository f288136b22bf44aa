"""The owner of a forward: a layer or mechanism of ours, another kernel that `kernels` loaded, or somebody else.

Forwards of ours are marked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, MethodType, ModuleType

from torch import nn

from kernels_ext_npu.catalogue import KERNELS, LAYERS

MATCHED = "_kernels_matched"  # attribute of our forwards: the forward of the class when ours was bound
OWNER = "_kernels_ext_npu_owner"  # attribute of our forwards: the layer or mechanism
_names: dict[str, str | None] = {}  # package -> name of the kernel that it is of; None of none


def kernel_name(forward: Callable | None) -> str | None:
    """Return the name of the kernel that a forward function was loaded from by `kernels`; None for any other."""
    if not isinstance(forward, FunctionType) or forward.__module__ is None:  # as code that torch.fx wrote has it
        return None
    package = forward.__module__.partition(".")[0]
    if package not in _names:
        from kernels import get_loaded_kernels

        _names[package] = next((str(k.metadata.name) for k in get_loaded_kernels() if k.metadata.id == package), None)
    return _names[package]


def kernel_package(forward: Callable) -> ModuleType:
    """Return the package of the kernel that a forward function of ours is of."""
    return sys.modules[forward.__module__.partition(".")[0]]


def layer_name(forward: Callable | None) -> str | None:
    """Return the layer of ours that a forward function belongs to; None for any other function."""
    layer = class_name(forward)
    return layer if layer in LAYERS and kernel_name(forward) in KERNELS else None


def class_name(forward: Callable | None) -> str:
    """Return the name of the class that a forward function was written in."""
    return getattr(forward, "__qualname__", "").partition(".")[0]


def marked(forward: FunctionType, owner: str) -> FunctionType:
    """Mark a forward as ours: it is that of a layer or a mechanism, such as "lora"."""
    setattr(forward, OWNER, owner)
    return forward


def forward_owner(module: nn.Module) -> str | None:
    """Return the owner of the forward that is bound to a module; None if it is not ours."""
    return getattr(getattr(vars(module).get("forward"), "__func__", None), OWNER, None)


def class_forward(module: nn.Module, ours: Callable, matched: Callable) -> Callable:
    """Return what a forward of ours calls in its place: the forward of the module's class.

    Whoever wrapped ours would have held the forward that the class had then, whatever it is given later.

    Args:
        ours: the function that asks.
        matched: the forward of the class when ours was bound.
    """
    bound = module.__dict__.get("forward")  # as Dynamo reads it, too
    return type(module).forward if getattr(bound, "__func__", None) is ours else matched


def set_forward(module: nn.Module, forward: FunctionType | None, owner: str) -> None:
    """Bind a forward to a module that has none of its own; with None, remove the one that this owner bound."""
    if forward is not None and "forward" not in vars(module):
        module.forward = MethodType(marked(forward, owner), module)  # type: ignore[method-assign]
    elif forward is None and forward_owner(module) == owner:
        del module.forward
