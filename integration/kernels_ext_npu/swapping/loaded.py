"""The kernel packages that `kernels` has loaded: whose a forward is, and what its package exports beside its layers.

Nothing else reaches into a loaded package. ``swiglu`` exports `packing`; ``fused_moe`` exports `blocks`, `gates` and
`layout`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

from kernels_ext_npu.catalogue import KERNELS, LAYERS

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
