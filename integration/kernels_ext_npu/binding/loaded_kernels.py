"""Whose a forward is: ours, and of which layer or mechanism, or that of another kernel that `kernels` has loaded.

Forwards of ours are marked. Nothing else reaches into a loaded package. ``swiglu`` exports `packing`; ``fused_moe``
exports `blocks`, `gates` and `layout`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from kernels_ext_npu.catalogue import KERNELS, LAYERS

MATCHED = "_kernels_matched"  # of a forward of ours: what the class of its module computed when it was put there
OWNER = "_kernels_ext_npu_owner"
_names: dict[str, str | None] = {}  # of kernels, by the package that `kernels` imported each as; None for any other


def kernel_name(forward: Callable | None) -> str | None:
    """Return the name of the kernel that a forward function was loaded from by `kernels`; None for any other."""
    if not isinstance(forward, FunctionType):
        return None
    package = forward.__module__.partition(".")[0]
    if package not in _names:
        from kernels import get_loaded_kernels

        _names[package] = next((str(k.metadata.name) for k in get_loaded_kernels() if k.metadata.id == package), None)
    return _names[package]


def layer_name(forward: Callable | None) -> str | None:
    """Return the layer of ours that a forward function belongs to; None for a stranger's."""
    layer = class_name(forward)
    return layer if layer in LAYERS and kernel_name(forward) in KERNELS else None


def class_name(forward: Callable | None) -> str:
    """Return the name of the class that a forward function was written in."""
    return getattr(forward, "__qualname__", "").partition(".")[0]


def package(forward: Callable) -> Any:
    """Return the loaded package that a forward function of ours comes from."""
    return sys.modules[forward.__module__.partition(".")[0]]


def marked(forward: FunctionType, owner: str) -> FunctionType:
    """Mark a forward as ours: it is that of a layer or a mechanism, such as "lora"."""
    setattr(forward, OWNER, owner)
    return forward


def forward_owner(module: nn.Module) -> str | None:
    """Return what the forward that was put on a module itself is marked with; None if it is not ours."""
    return getattr(getattr(vars(module).get("forward"), "__func__", None), OWNER, None)


def set_forward(module: nn.Module, forward: FunctionType | None, owner: str) -> None:
    """Give a module a forward, marked with whose it is, where nobody has; without one take out that of the owner."""
    if forward is not None and "forward" not in vars(module):
        module.forward = MethodType(marked(forward, owner), module)  # type: ignore[method-assign]
    elif forward is None and forward_owner(module) == owner:
        del module.forward
