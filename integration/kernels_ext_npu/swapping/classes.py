"""Marks the classes of a model for `kernels`: which layer takes their place, and on which instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.api import register
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.matching.lookup import find_reference
from kernels_ext_npu.swapping import forwards

ABSENT = object()

_without_weights: ContextVar[bool] = ContextVar("_without_weights", default=False)


class Marks:
    """The marks on classes, and what was there before."""

    def __init__(self) -> None:
        self._before: list[tuple[type, str, Any]] = []
        self._seen: set[type] = set()

    def mark(self, model: nn.Module, mapping: dict[str, dict]) -> None:
        """Mark every class of a model that a kernel serves, and unmark those whose mark promises what is not true."""
        for module in model.modules():
            cls = type(module)
            if cls not in self._seen:
                self._seen.add(cls)
                self._mark(module, mapping)

    def choose(self, model: nn.Module) -> Iterator[nn.Module]:
        """The modules for which their class has to be marked for another layer, while it is.

        `kernels` reads the mark of a class, and the activation that decides belongs to an instance.
        """
        for module in model.modules():
            reference = find_reference(type(module))
            if reference is None or refusal(module) is not None:
                continue
            cls: Any = type(module)
            before, chosen = cls.kernel_layer_name, reference.layer(module)
            if before != chosen:
                cls.kernel_layer_name = chosen
                try:
                    yield module
                finally:
                    cls.kernel_layer_name = before

    def _mark(self, module: nn.Module, mapping: dict[str, dict]) -> None:
        cls = type(module)
        reference, marked = find_reference(cls), getattr(cls, "kernel_layer_name", None)
        if reference is not None:
            layer = reference.layer(module)
            if marked is not None and marked != layer:  # other devices keep the kernels they had
                mapping[layer] = mapping.get(marked, {}) | mapping[layer]
            self._set(cls, "kernel_layer_name", layer)
        elif marked not in LAYERS:
            return
        self._set(cls, "kernel_condition", staticmethod(_condition(getattr(cls, "kernel_condition", None), marked)))

    def remove(self) -> None:
        """Leave the classes as they were."""
        for cls, name, value in reversed(self._before):
            if value is ABSENT:
                delattr(cls, name)
            else:
                setattr(cls, name, value)
        self._before.clear()
        self._seen.clear()

    def _set(self, cls: type, name: str, value: Any) -> None:
        self._before.append((cls, name, vars(cls).get(name, ABSENT)))
        setattr(cls, name, value)


def _condition(before: Callable | None, marked: str | None) -> Callable[[nn.Module], bool]:
    """On the NPU our own; elsewhere what transformers had, which is nothing for a class that it did not mark."""

    def condition(module: nn.Module) -> bool:
        if device_of(module) not in ("npu", None):
            return marked is not None and (before is None or before(module))
        reference: Any = find_reference(type(module))
        return refusal(module) is None and vars(type(module))["kernel_layer_name"] == reference.layer(module)

    return condition


def refusal(module: nn.Module) -> str | None:
    """Why no kernel can take the place of a module's forward; None if one can."""
    reference = find_reference(type(module))
    if reference is None:
        stranger = replaced(module)
        if stranger is not None:
            return f"another library replaced its forward: {stranger}"
        return "no kernel computes what its forward computes"
    if device_of(module) not in ("npu", None):
        return f"it is on {device_of(module)}: load with device_map='npu', or move the model and call kernelize(model)"
    return register.left_out(reference.repository) or forwards.refusal(module) or reference.refuse(module)


def replaced(module: nn.Module) -> str | None:
    """The name of a forward that another library gave a module, or its class, in place of its own."""
    bound = vars(module).get("forward")
    own = forwards.own_forward(module)
    forward = own or (bound.__func__ if isinstance(bound, MethodType) else type(module).forward)
    if not isinstance(forward, FunctionType) or forwards.kernel_name(forward) is not None:
        return None
    return foreign(forward, *(base.__module__ for base in type(module).__mro__))


def foreign(function: FunctionType, *modules: str) -> str | None:
    """The full name of a function that comes from another library than all these modules; None if it does not."""
    libraries = {module.partition(".")[0] for module in modules}
    if function.__module__.partition(".")[0] in libraries:
        return None
    return f"{function.__module__}.{function.__qualname__}"


def has_no_weights(model: nn.Module) -> bool:
    """Whether the parameters of a model are all on meta, and accelerate has none of them elsewhere."""
    return all(parameter.is_meta for parameter in model.parameters()) and _where(model) == "meta"


@contextmanager
def on_its_way(model: nn.Module) -> Iterator[bool]:
    """Says whether a model has no weights yet; if so, its modules count as on the NPU, where they are to be loaded.

    Its buffers need not be on meta: accelerate's ``init_empty_weights`` leaves them on the CPU.
    """
    token = _without_weights.set(has_no_weights(model))
    try:
        yield _without_weights.get()
    finally:
        _without_weights.reset(token)


def awaits_weights() -> bool:
    """Whether this is about a model that has no weights yet."""
    return _without_weights.get()


def device_of(module: nn.Module) -> str | None:
    """Where a module computes, None if it has no tensors. accelerate moves what is offloaded when it is called."""
    return "npu" if awaits_weights() else _where(module)


def _where(module: nn.Module) -> str | None:
    tensor: torch.Tensor | None = next(module.parameters(), None)
    if tensor is None:
        tensor = next(module.buffers(), None)
    if tensor is None:
        return None
    if tensor.is_meta:
        hooks = (getattr(child, "_hf_hook", None) for child in module.modules())
        devices = [getattr(hook, "execution_device", None) for hook in hooks]
        return next((torch.device(device).type for device in devices if device is not None), "meta")
    return computes_on(tensor)


def computes_on(tensor: torch.Tensor) -> str:
    """The device that a tensor is used on. FSDP keeps what is offloaded on the CPU between a module's calls."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None:
        return str(mesh.device_type)
    is_flat = getattr(tensor, "_fsdp_flattened", False) or getattr(tensor, "_is_flat_param", False)
    accelerator = torch.accelerator.current_accelerator() if is_flat else None
    return accelerator.type if accelerator is not None else tensor.device.type
