"""Keeps gate and up of swapped MLPs side by side. The layout is the kernel's own: it reads what it has written.

It stays when the kernel is taken out: each weight has a storage of its own there, in which it looks as ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from kernels_ext_npu.binding.devices import awaits_weights
from kernels_ext_npu.binding.forward_binding import bound_layer, bound_package
from kernels_ext_npu.binding.loaded_kernels import forward_owner
from kernels_ext_npu.catalogue import MLPS
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View

# those that multiply with gate and up, each a projection
WITH_GATE_AND_UP = tuple([layer for layer in MLPS.layers if not layer.startswith("Fused")])
# those that take gate and up as one tensor, whoever has computed it
JOINING = ("SwiGLUMLP", "GeGLUMLP", "ExactGeGLUMLP")


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Pack the projections of every swapped MLP where that can be; otherwise its forward multiplies twice."""
    for module, (layer, package) in view.placed.items():
        if layer in WITH_GATE_AND_UP:
            package.packing.pack(*_multiplied(module, layer, package))
        if layer in MLPS.layers:
            package.packing.meet(module)


def remarks(view: View, served: list[Decision]) -> dict[Decision, str | None]:
    """Say of swapped MLPs why they multiply twice, or compute in torch."""
    return {d: _remark(d.module, d.present) for d in served if d.present in MLPS.layers}  # type: ignore[arg-type]


def _remark(module: nn.Module, layer: str) -> str | None:
    if (package := bound_package(module)) is None:  # it multiplies by modules of other names
        return None
    if layer in WITH_GATE_AND_UP and (apart := why_apart(_multiplied(module, layer, package), package.packing)):
        return None if _adapts_others(module, package) else f"two products, since {apart}"
    return package.alignment.unaligned(module) if module.training else None


def _adapts_others(module: nn.Module, package: Any) -> bool:
    """Tell whether a kernel computes projections that are no plain layers: adapted ones, or such in few bits."""
    pair = package.packing.projections(module)[:2]
    if all(forward_owner(each) == "compressed" for each in pair):
        return True
    return all(forward_owner(each) == "lora" and type(each.base_layer) is not nn.Linear for each in pair)


def why_apart(pair: tuple[Any, Any], layout: Any) -> str | None:
    """Return why gate and up are two products; None if they are one."""
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


def _multiplied(module: nn.Module, layer: str, package: Any) -> tuple[Any, Any]:
    """Return the layers of a swapped MLP that are laid side by side: of those with adapters what they adapt."""
    gate, up, _ = package.packing.projections(module)
    is_adapted = layer in JOINING and forward_owner(gate) == forward_owner(up) == "lora"
    return (gate.base_layer, up.base_layer) if is_adapted else (gate, up)


FINDER = Finder("gate and up", put=put, remarks=remarks)
