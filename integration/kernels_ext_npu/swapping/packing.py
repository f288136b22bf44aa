"""Keeps gate and up of swapped MLPs in one storage. The layout is the kernel's own: it reads what it has written."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from kernels_ext_npu.swapping import loaded
from kernels_ext_npu.swapping.devices import awaits_weights
from kernels_ext_npu.swapping.forwards import kernel_forward

_LAYERS = ("SwiGLUMLP", "GeGLUMLP")  # those with two projections


class Pair(NamedTuple):
    """The projections of a swapped MLP, and the packing of its kernel."""

    kernel: Any
    gate: nn.Module
    up: nn.Module

    def separate(self) -> str | None:
        """Return why they are multiplied one after the other; None if they are packed."""
        return self.kernel.separate(self.gate, self.up)

    def pack(self) -> None:
        """Lay their weights side by side where that can be."""
        self.kernel.pack(self.gate, self.up)

    def unpack(self) -> None:
        """Give their weights storages of their own."""
        self.kernel.unpack(self.gate, self.up)


def pack(model: nn.Module) -> None:
    """Pack the projections of every swapped MLP where that can be; otherwise its forward multiplies twice."""
    for pair in pairs(model):
        pair.pack()


def unpack(model: nn.Module) -> None:
    """Give the projections of every swapped MLP storages of their own again."""
    for pair in packed(model):
        pair.unpack()


def unpack_pair(module: nn.Module) -> None:
    """Give the projections of one swapped MLP storages of their own again."""
    pair = _pair(module)
    if pair is not None and pair.separate() is None:
        pair.unpack()


def separate(module: nn.Module) -> str | None:
    """Return why a swapped MLP multiplies twice; None if it does not, or is no MLP with two projections."""
    pair = _pair(module)
    apart = pair.separate() if pair is not None else None
    if apart is not None and awaits_weights():
        return "its weights are on meta: once they are loaded kernelize(model) lays them side by side"
    return apart


def pairs(model: nn.Module) -> Iterator[Pair]:
    """Find the projections of the swapped MLPs of a model."""
    return (pair for module in model.modules() if (pair := _pair(module)) is not None)


def packed(model: nn.Module) -> list[Pair]:
    """Find the projections of the swapped MLPs of a model that lie side by side."""
    return [pair for pair in pairs(model) if pair.separate() is None]


def _pair(module: nn.Module) -> Pair | None:
    forward = kernel_forward(module)
    if forward is None or loaded.layer_name(forward) not in _LAYERS:
        return None
    kernel = loaded.package(forward).packing
    gate, up, _ = kernel.projections(module)
    return Pair(kernel, gate, up)
