"""Keeps gate and up of swapped MLPs side by side. The layout is the kernel's own: it reads what it has written.

It stays when the kernel is taken out: each weight has a storage of its own there, in which it looks as ever.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from kernels_ext_npu.binding.devices import awaits_weights
from kernels_ext_npu.binding.forward_binding import layer_of, package_of
from kernels_ext_npu.binding.loaded_kernels import owner_of
from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.swaps.protocol import Swapping

# those that multiply with gate and up, each a projection
WITH_GATE_AND_UP = tuple([layer for layer in MLPS.layers if not layer.startswith("Fused")])
# those that take gate and up as one tensor, whoever has computed it
JOINING = ("SwiGLUMLP", "GeGLUMLP", "ExactGeGLUMLP")


class Pair(NamedTuple):
    """The projections of a swapped MLP, of those with adapters what they adapt, and the packing of its kernel."""

    kernel: Any
    gate: nn.Module
    up: nn.Module


def apply(model: nn.Module, swapping: Swapping) -> None:
    """Pack the projections of every swapped MLP where that can be; otherwise its forward multiplies twice."""
    for module, layer, package in swapping.placed:
        if (pair := _pair_of(module, layer, package)) is not None:
            pair.kernel.pack(pair.gate, pair.up)
        if layer in MLPS.layers:
            package.packing.meet(module)


def why_not_packed(module: nn.Module) -> str | None:
    """Return why a swapped MLP multiplies twice; None if it does not, or is no MLP with two projections."""
    pair = _pair_of(module, layer_of(module), package_of(module))
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
    if layer_of(module) not in WITH_GATE_AND_UP:
        return None
    gate, up, _ = package_of(module).packing.projections(module)
    return gate, up


def unaligned(module: nn.Module) -> str | None:
    """Return why a swapped MLP that is trained computes in torch; None if it does not, or is no MLP."""
    if not module.training or layer_of(module) not in MLPS.layers:
        return None
    return package_of(module).alignment.unaligned(module)


def _pair_of(module: nn.Module, layer: str | None, package: Any) -> Pair | None:
    if layer not in WITH_GATE_AND_UP:
        return None
    gate, up, _ = package.packing.projections(module)
    if layer in JOINING and owner_of(gate) == owner_of(up) == "lora":
        gate, up = gate.base_layer, up.base_layer
    return Pair(package.packing, gate, up)
