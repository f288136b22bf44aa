"""The device that a module computes on, also while its weights are offloaded or not loaded yet."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain

import torch
from torch import nn

_without_weights: ContextVar[bool] = ContextVar("_without_weights", default=False)


def check_is_module(function: str, model: object) -> None:
    """Raise a TypeError that names the public function if it was called with anything but a module.

    Of an object that holds modules, such as a pipeline, it names these.
    """
    if isinstance(model, nn.Module):
        return
    kind, members = type(model).__name__, getattr(model, "__dict__", {})
    held = [name for name, value in members.items() if isinstance(value, nn.Module)]
    if held:
        raise TypeError(f"{function}: a {kind} is no module of torch: pass those that it holds, {' and '.join(held)}")
    raise TypeError(
        f"{function}: {reprlib.repr(model)} is a {kind}, and a loaded model is needed: "
        "AutoModelForCausalLM.from_pretrained(..., device_map='npu')"
    )


@contextmanager
def assume_npu_if_meta(model: nn.Module) -> Iterator[bool]:
    """Yield whether a model has no weights yet; if so, its modules count as on the NPU, where they will be loaded.

    Its parameters are all on meta then, and accelerate has none of them elsewhere. Its buffers need not be on meta:
    accelerate's ``init_empty_weights`` leaves them on the CPU.
    """
    has_none = all(parameter.is_meta for parameter in model.parameters()) and _where(model) == "meta"
    token = _without_weights.set(has_none)
    try:
        yield _without_weights.get()
    finally:
        _without_weights.reset(token)


def awaits_weights() -> bool:
    """Tell whether the model at hand has no weights yet."""
    return _without_weights.get()


def compute_device(module: nn.Module) -> str | None:
    """Return the type of device that a module computes on, such as "npu"; None if it has no tensors.

    accelerate moves what is offloaded when it is called.
    """
    return "npu" if _without_weights.get() else _where(module)


def is_elsewhere(module: nn.Module) -> bool:
    """Tell whether a module computes on another device than the NPU."""
    return compute_device(module) not in ("npu", None)


def computes_on(tensor: torch.Tensor) -> str:
    """Return the device that a tensor is used on. FSDP keeps what is offloaded on the CPU between a module's calls."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None:
        return str(mesh.device_type)
    is_flat = getattr(tensor, "_fsdp_flattened", False) or getattr(tensor, "_is_flat_param", False)
    accelerator = torch.accelerator.current_accelerator() if is_flat else None
    return accelerator.type if accelerator is not None else tensor.device.type


def is_capturing() -> bool:
    """Tell whether a graph is being captured on the NPU: nothing can be read then, nor kept for later."""
    return torch.get_device_module("npu").is_current_stream_capturing()


def _where(module: nn.Module) -> str | None:
    tensor: torch.Tensor | None = next(chain(module.parameters(), module.buffers()), None)
    if tensor is None:
        return None
    if tensor.is_meta:
        hooks = (getattr(child, "_hf_hook", None) for child in module.modules())
        devices = [getattr(hook, "execution_device", None) for hook in hooks]
        return next((torch.device(device).type for device in devices if device is not None), "meta")
    return computes_on(tensor)
