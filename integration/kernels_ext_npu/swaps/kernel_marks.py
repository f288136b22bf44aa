"""Marks the classes of a model for `kernels`: which layer takes their place, and on which instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from kernels_ext_npu.binding import forward_binding
from kernels_ext_npu.binding.devices import is_elsewhere
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.distribution import kernels_internals
from kernels_ext_npu.matching.lookup import find_pattern, why_not_served
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import kernel_mapping, refusals
from kernels_ext_npu.swaps.experts.implementation import other_than_ours
from kernels_ext_npu.swaps.experts.serving import LAYER as EXPERTS
from kernels_ext_npu.swaps.kernel_mapping import marked
from kernels_ext_npu.swaps.protocol import Swapping

if TYPE_CHECKING:
    from kernels import Mode

# the layers of modules, while `kernels` asks for them
_decided: ContextVar[Mapping[nn.Module, str | None]] = ContextVar("_decided", default=MappingProxyType({}))


def mark(swapping: Swapping) -> None:
    """Mark the classes of a model for the layers that serve them; those whose mark promises what is not true lose it.

    `kernels` reads the mark of a class. Where what decides belongs to an instance, as an activation does, its layer may
    be another one, which `take_as` takes.
    """
    active = swapping.registration
    for cls, modules in swapping.by_class.items():
        if cls not in active.marked:
            active.marked.add(cls)
            _mark(active, modules[0])


def take_as(module: nn.Module, layer: str, mode: Mode) -> None:
    """Let `kernels` take a layer for a module that its class is not marked for."""
    cls: Any = type(module)
    before, cls.kernel_layer_name = cls.kernel_layer_name, layer
    try:
        kernels_internals.take(module, mode)
    finally:
        cls.kernel_layer_name = before


@contextmanager
def decided(layers: Mapping[nn.Module, str | None]) -> Iterator[None]:
    """Let `kernels` ask which layers serve modules without looking at these again."""
    token = _decided.set(layers)
    try:
        yield
    finally:
        _decided.reset(token)


def layer_for(module: nn.Module, reference: Pattern | None) -> str | None:
    """Return the layer that serves a module, whose forward is that of a pattern, on the NPU; None if none does."""
    return None if reference is None or refusal(module, reference) is not None else reference.layer_for(module)


def refusal(module: nn.Module, reference: Pattern | None) -> str | None:
    """Return why no kernel can take the place of a module's forward, which is that of a pattern; None if one can."""
    if reference is None:
        stranger = forward_binding.stranger(module)
        if stranger is not None:
            return Reason("replaced", f"another library replaced its forward: {stranger}")
        return refusals.FORWARD_UNKNOWN
    reason = refusals.elsewhere(module) or forward_binding.refuse_wrapper(module)
    return reason or unwanted(module, reference) or why_not_served(module, reference)


def unwanted(module: nn.Module, reference: Pattern) -> Reason | None:
    """Return why somebody does not want the kernel for an instance; None if nobody said so."""
    if (reason := refusals.unwanted(module, reference.repository)) is not None:
        return reason
    asked_for = other_than_ours(module.config) if EXPERTS in reference.layers else None
    return None if asked_for is None else Reason("named", f"the experts implementation {asked_for} was asked for")


def _mark(active: Registration, module: nn.Module) -> None:
    cls, before = type(module), marked(type(module))
    if (reference := find_pattern(cls)) is not None:
        kernel_mapping.mark(active, cls, reference.layer_for(module))
    elif before not in LAYERS:
        return
    condition = _condition(getattr(cls, "kernel_condition", None), before)
    active.patches.attribute(cls, "kernel_condition", staticmethod(condition))


def _condition(before: Callable | None, mark: str | None) -> Callable[[nn.Module], bool]:
    """Return the condition on instances that `kernels` asks for: on the NPU ours, elsewhere what transformers had.

    For a class that transformers did not mark that is nothing: elsewhere none of its instances is swapped.
    """

    def condition(module: nn.Module) -> bool:
        known = _decided.get()
        layer = known[module] if module in known else layer_for(module, find_pattern(type(module)))
        if layer is not None:
            return marked(type(module)) == layer
        return is_elsewhere(module) and mark is not None and (before is None or before(module))

    return condition
