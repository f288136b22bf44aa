"""Gate and up of swapped MLPs in one storage. How, is the kernel's own: it reads what it has written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType

from torch import nn

from kernels_ext_npu.swapping.classes import awaits_weights
from kernels_ext_npu.swapping.forwards import kernel_forward


def pack(model: nn.Module) -> None:
    """Pack the projections of every swapped MLP where that can be; otherwise its forward multiplies twice."""
    for kernel, gate, up in pairs(model):
        kernel.pack(gate, up)


def unpack(model: nn.Module) -> None:
    """Give the projections storages of their own again."""
    for kernel, gate, up in pairs(model):
        if kernel.separate(gate, up) is None:
            kernel.unpack(gate, up)


def separate(module: nn.Module) -> str | None:
    """Why a swapped MLP multiplies twice; None if it does not, or is no MLP with two projections."""
    apart = next((kernel.separate(gate, up) for kernel, gate, up in _pair(module)), None)
    if apart is not None and awaits_weights():
        return "its weights are on meta: once they are loaded kernelize(model) lays them side by side"
    return apart


def pairs(model: nn.Module) -> Iterator[tuple[ModuleType, nn.Module, nn.Module]]:
    """The swapped MLPs of a model: the packing of their kernel, gate and up."""
    for module in model.modules():
        yield from _pair(module)


def _pair(module: nn.Module) -> Iterator[tuple[ModuleType, nn.Module, nn.Module]]:
    forward = kernel_forward(module)
    if forward is None or forward.__qualname__ not in ("SwiGLUMLP.forward", "GeGLUMLP.forward"):
        return
    package, _, _ = forward.__module__.partition(".")
    packing = sys.modules[f"{package}.packing"]
    gate, up, _ = packing.projections(module)
    yield packing, gate, up
