"""Marks the classes of a model for `kernels`: which layer takes their place, and on which instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from torch import nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.matching.lookup import find_reference
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.references import Reference
from kernels_ext_npu.swapping import experts_choice, forwards, kernel_mapping, refusals, state
from kernels_ext_npu.swapping.devices import is_elsewhere
from kernels_ext_npu.swapping.state import Registration

if TYPE_CHECKING:
    from kernels import Mode

# of the modules of the model at hand that a layer serves: which
_served: ContextVar[dict[nn.Module, str] | None] = ContextVar("_served", default=None)


@contextmanager
def decided(registration: Registration, modules: Sequence[nn.Module]) -> Iterator[list[tuple[nn.Module, str]]]:
    """Decide which layer each module gets, and mark their classes.

    Classes whose mark promises what is not true are unmarked.

    Returns:
        The modules that get another layer than their class is marked for, each with its layer: `kernels` reads the mark
        of a class, and the activation that decides belongs to an instance.
    """
    layers = {module: layer for module in modules if (layer := layer_for(module)) is not None}
    for module in modules:
        if type(module) not in registration.marked:
            registration.marked.add(type(module))
            _mark(registration, module)
    token = _served.set(layers)
    try:
        yield [(module, layer) for module, layer in layers.items() if layer != _marked(type(module))]
    finally:
        _served.reset(token)


def take_as(module: Any, layer: str, mode: Mode) -> None:
    """Let `kernels` take a layer for a module that its class is not marked for."""
    from kernels import Device, KernelizeFallback
    from kernels.layer.layer import kernelize_layer

    cls: Any = type(module)
    before, cls.kernel_layer_name = cls.kernel_layer_name, layer
    try:
        kernelize_layer(module, mode=mode, device_type=Device("npu"), use_fallback=KernelizeFallback.ALL)
    finally:
        cls.kernel_layer_name = before


def layer_for(module: nn.Module) -> str | None:
    """Return the layer that serves a module on the NPU; None if none does."""
    reference = find_reference(type(module))
    return None if reference is None or refusal(module) is not None else reference.layer(module)


def refusal(module: nn.Module) -> str | None:
    """Return why no kernel can take the place of a module's forward; None if one can."""
    reference = find_reference(type(module))
    if reference is None:
        stranger = forwards.stranger(module)
        return refusals.FORWARD_UNKNOWN if stranger is None else refusals.replaced(stranger)
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    return forwards.refuse_wrapper(module) or fits(module, reference)


def fits(module: nn.Module, reference: Reference) -> str | None:
    """Return why the kernel for what a class computes is not for this instance, wherever it is; None if it is."""
    return not_wanted(module, reference) or reference.refuse(module)


def not_wanted(module: nn.Module, reference: Reference) -> Reason | None:
    """Return why somebody does not want the kernel for an instance; None if nobody said so."""
    if module in state.restored:
        return refusals.RESTORED
    if (left_out := refusals.left_out(reference.repository)) is not None:
        return left_out
    asked_for = experts_choice.named(module.config) if experts_choice.is_experts(module) else None
    return None if asked_for is None else Reason("named", f"the experts implementation {asked_for} was asked for")


def _mark(registration: Registration, module: nn.Module) -> None:
    cls, marked = type(module), _marked(type(module))
    reference = find_reference(cls)
    if reference is not None:
        layer = reference.layer(module)
        if marked is not None and marked != layer:
            kernel_mapping.move_mark(registration, marked, layer)
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
        served = _served.get()
        layer = layer_for(module) if served is None else served.get(module)
        if layer is None and is_elsewhere(module):
            return marked is not None and (before is None or before(module))
        return layer is not None and vars(type(module))["kernel_layer_name"] == layer

    return condition
