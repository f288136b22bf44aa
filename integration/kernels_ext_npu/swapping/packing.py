"""Keeps gate and up of swapped MLPs side by side. The layout is the kernel's own: it reads what it has written.

It stays when the kernel is taken out: each weight has a storage of its own there, in which it looks as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.swapping import loaded
from kernels_ext_npu.swapping.devices import awaits_weights
from kernels_ext_npu.swapping.forwards import kernel_forward
from kernels_ext_npu.swapping.own_forwards import owner_of

# those that multiply with gate and up, each a projection
WITH_GATE_AND_UP = (
    "ClampedSwiGLUMLP",
    "DropoutMLP",
    "DroppedMLP",
    "ExactGeGLUMLP",
    "GeGLUMLP",
    "GloballyScaledMLP",
    "NormedMLP",
    "ScaledSwiGLUMLP",
    "SwiGLUMLP",
)


# those that take gate and up as one tensor, whoever has computed it
JOINING = ("SwiGLUMLP", "GeGLUMLP", "ExactGeGLUMLP")


class Pair(NamedTuple):
    """The projections of a swapped MLP, of those with adapters what they adapt, and the packing of its kernel."""

    kernel: Any
    gate: nn.Module
    up: nn.Module


def pack(model: nn.Module) -> None:
    """Pack the projections of every swapped MLP where that can be; otherwise its forward multiplies twice."""
    for kernel, gate, up in pairs(model):
        kernel.pack(gate, up)
    for module in model.modules():
        forward = kernel_forward(module)
        if forward is not None and loaded.layer_name(forward) in MLPS.layers:
            loaded.package(forward).packing.meet(module)


def separate(module: nn.Module) -> str | None:
    """Return why a swapped MLP multiplies twice; None if it does not, or is no MLP with two projections."""
    pair = _pair(module)
    if pair is None:
        return None
    kernel, gate, up = pair
    apart = kernel.separate(gate, up)
    if apart is None:
        return None
    if awaits_weights():
        return "its weights are on meta: once they are loaded kernelize(model) lays them side by side"
    return kernel.obstacle(gate, up) or f"{apart}: kernelize(model) lays them so"


def called(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return gate and up of a swapped MLP as it calls them, with their adapters; None if it has no such pair."""
    forward = kernel_forward(module)
    if forward is None or loaded.layer_name(forward) not in WITH_GATE_AND_UP:
        return None
    gate, up, _ = loaded.package(forward).packing.projections(module)
    return gate, up


def unaligned(module: nn.Module) -> str | None:
    """Return why a swapped MLP that is trained computes in torch; None if it does not, or is no MLP."""
    forward = kernel_forward(module)
    if forward is None or not module.training or loaded.layer_name(forward) not in MLPS.layers:
        return None
    return loaded.package(forward).alignment.unaligned(module)


def pairs(model: nn.Module) -> Iterator[Pair]:
    """Find the projections of the swapped MLPs of a model."""
    return (pair for module in model.modules() if (pair := _pair(module)) is not None)


def _pair(module: nn.Module) -> Pair | None:
    forward = kernel_forward(module)
    if forward is None or loaded.layer_name(forward) not in WITH_GATE_AND_UP:
        return None
    kernel = loaded.package(forward).packing
    gate, up, _ = kernel.projections(module)
    if loaded.layer_name(forward) in JOINING and all(_is_adapted(layer) for layer in (gate, up)):
        gate, up = gate.base_layer, up.base_layer
    return Pair(kernel, gate, up)


def _is_adapted(layer: nn.Module) -> bool:
    """Tell whether a kernel computes a layer with adapters, which it may do together with another one."""
    return owner_of(layer) == "lora"
