"""Keeps gate and up of swapped MLPs side by side. The layout is the kernel's own: it reads what it has written.

It stays when the kernel is taken out: each weight has a storage of its own there, in which it looks as ever.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from kernels_ext_npu.binding.devices import awaits_weights
from kernels_ext_npu.binding.forward_binding import bound_layer, bound_package
from kernels_ext_npu.binding.loaded_kernels import forward_owner
from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.swaps.protocol import Swapping

# those that multiply with gate and up, each a projection
WITH_GATE_AND_UP = tuple([layer for layer in MLPS.layers if not layer.startswith("Fused")])
# those that take gate and up as one tensor, whoever has computed it
JOINING = ("SwiGLUMLP", "GeGLUMLP", "ExactGeGLUMLP")


def apply(model: nn.Module, swapping: Swapping) -> None:
    """Pack the projections of every swapped MLP where that can be; otherwise its forward multiplies twice."""
    for module, layer, package in swapping.placed:
        if layer in WITH_GATE_AND_UP and (pair := _multiplied(module)) is not None:
            package.packing.pack(*pair)
        if layer in MLPS.layers:
            package.packing.meet(module)


def why_apart(module: nn.Module) -> str | None:
    """Return why a swapped MLP multiplies twice; None if it does not, or is no MLP with two projections."""
    pair = _multiplied(module)
    if pair is None:
        return None
    layout = bound_package(module).packing
    apart = layout.separate(*pair)
    if apart is None:
        return None
    if awaits_weights():
        return "its weights are on meta: once they are loaded kernelize(model) lays them side by side"
    return layout.obstacle(*pair) or f"{apart}: kernelize(model) lays them so"


def called(module: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """Return gate and up of a swapped MLP as it calls them, with their adapters; None if it has no such pair."""
    if bound_layer(module) not in WITH_GATE_AND_UP:
        return None
    gate, up, _ = bound_package(module).packing.projections(module)
    return gate, up


def unaligned(module: nn.Module) -> str | None:
    """Return why a swapped MLP that is trained computes in torch; None if it does not, or is no MLP."""
    if not module.training or bound_layer(module) not in MLPS.layers:
        return None
    return bound_package(module).alignment.unaligned(module)


def _multiplied(module: nn.Module) -> tuple[Any, Any] | None:
    """Return the layers of a swapped MLP that are laid side by side: of those with adapters what they adapt."""
    pair = called(module)
    if pair is None or any(forward_owner(each) != "lora" for each in pair) or bound_layer(module) not in JOINING:
        return pair
    return pair[0].base_layer, pair[1].base_layer  # type: ignore[return-value]
