"""Marks the classes of a model for `kernels`: which layer takes their place, and on which instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.swapping import table
from kernels_ext_npu.swapping.devices import is_elsewhere
from kernels_ext_npu.swapping.refusals import refusal
from kernels_ext_npu.swapping.state import Registration


def mark(registration: Registration, model: nn.Module) -> None:
    """Mark every class of a model that a kernel serves, and unmark those whose mark promises what is not true."""
    for module in model.modules():
        if type(module) not in registration.marked:
            registration.marked.add(type(module))
            _mark(registration, module)


def otherwise_served(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Find the modules for which their class is marked for another layer than theirs, each with its layer.

    `kernels` reads the mark of a class, and the activation that decides belongs to an instance.
    """
    found = []
    for module in model.modules():
        reference = find_pattern(type(module))
        if reference is not None and refusal(module) is None:
            layer = reference.layer_for(module)
            if layer != _marked(type(module)):
                found.append((module, layer))
    return found


@contextmanager
def marked_as(cls: Any, layer: str) -> Iterator[None]:
    """Let a class be marked for another layer inside the context."""
    before = cls.kernel_layer_name
    cls.kernel_layer_name = layer
    try:
        yield
    finally:
        cls.kernel_layer_name = before


def _mark(registration: Registration, module: nn.Module) -> None:
    cls, marked = type(module), _marked(type(module))
    reference = find_pattern(cls)
    if reference is not None:
        layer = reference.layer_for(module)
        if marked is not None and marked != layer:
            table.move_mark(registration, marked, layer)
        registration.patches.attribute(cls, "kernel_layer_name", layer)
    elif marked not in LAYERS:
        return
    condition = _condition(getattr(cls, "kernel_condition", None), marked)
    registration.patches.attribute(cls, "kernel_condition", staticmethod(condition))


def _marked(cls: type) -> str | None:
    return getattr(cls, "kernel_layer_name", None)


def _condition(before: Callable | None, marked: str | None) -> Callable[[nn.Module], bool]:
    """Return the condition on instances that `kernels` asks for: on the NPU ours, elsewhere what transformers had.

    For a class that transformers did not mark that is nothing: elsewhere none of its instances is swapped.
    """

    def condition(module: nn.Module) -> bool:
        if is_elsewhere(module):
            return marked is not None and (before is None or before(module))
        reference: Any = find_pattern(type(module))
        return refusal(module) is None and vars(type(module))["kernel_layer_name"] == reference.layer_for(module)

    return condition
