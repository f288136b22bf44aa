"""The one sequence by which kernels get into a model: mark classes, let `kernels` bind their layers, apply the rest.

`from_pretrained(use_kernels=True)`, `kernelize(model)` and the first call of a model that waited all go through it.
"""

from __future__ import annotations

import inspect
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import kernels
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.hub_kernels import register_kernel_mapping_transformers

from kernels_ext_npu.binding import registration, use_kernels_flag
from kernels_ext_npu.binding.devices import assume_npu_if_meta, compute_device
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.swaps import finders
from kernels_ext_npu.swaps.decision import Swapping, View

logger = logging.getLogger("kernels_ext_npu")

_AT_MOST = 20  # rows in an error


def install(patches: Patches) -> None:
    """Let transformers' ``set_use_kernels`` swap our kernels while they are registered."""
    patches.method(PreTrainedModel, "set_use_kernels", _set_use_kernels, registration.is_active)


def run(model: nn.Module, mode: kernels.Mode | None, bind_layers: Callable[[kernels.Mode], None]) -> None:
    """Swap the registered kernels into a model.

    Args:
        model: one that computes on the NPU, or has no weights yet (see assume_npu_if_meta), or is to take what
            other devices have.
        mode: by default training or inference, as the model is.
        bind_layers: lets `kernels` bind layers to marked classes, by transformers' mapping.

    Raises:
        RuntimeError: register(strict=True) was called, and the model keeps what a kernel might serve.
    """
    active = registration.current
    assert active is not None
    active.unloadable.clear()  # a Hub may answer by now
    if mode is None:
        mode = kernels.Mode.TRAINING if model.training else kernels.Mode.INFERENCE
    view, swapping = View(model), Swapping(active, mode, bind_layers)
    for finder in finders.FINDERS:
        finder.put(view, finder.find(view), swapping)
    if active.strict:
        _check_strictly(model)


def swap_in(model: nn.Module, mode: kernels.Mode | None = None) -> None:
    """Swap the registered kernels into a loaded model, which keeps them when its mode changes.

    Raises:
        RuntimeError: as `run` does.
    """
    registration.restored.difference_update(model.modules())

    def bind_layers(mode: kernels.Mode) -> None:
        bind_layers_on_npu(model, mode)
        for pretrained in outermost(model):  # whose train() and eval() swap kernels again
            was_asked = use_kernels_flag.is_noted(pretrained) and not use_kernels_flag.is_for_npu_only(pretrained)
            use_kernels_flag.note(pretrained, was_asked)

    run(model, mode, bind_layers)


def swap_in_at_first_call(model: nn.Module) -> None:
    """Swap the registered kernels into a model that waited, and log the report, on one rank."""
    with assume_npu_if_meta(model):
        swap_in(model)
    from kernels_ext_npu.reporting.report import report

    level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.DEBUG
    logger.log(level, "kernels-ext-npu: %s at its first forward:\n%s", type(model).__name__, report(model))


def _set_use_kernels(original: Callable, model: Any, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
    if not use_kernels:
        original(model, use_kernels, *args, **kwargs)
        return
    given = inspect.signature(original).bind(model, use_kernels, *args, **kwargs).arguments
    if not model.use_kernels:  # train() and eval() look again where it is on already
        registration.restored.difference_update(model.modules())
    with assume_npu_if_meta(model):
        is_away = compute_device(model) != "npu"
        # offloaded, or without weights yet: transformers would take kernels for the CPU, or for meta
        waits = not is_away and model.device.type != "npu"
        is_for_npu_only = use_kernels_flag.is_for_npu_only(model)
        if is_away and not is_for_npu_only:
            warnings.warn(
                f"use_kernels=True: {type(model).__name__} is on {model.device.type}, and kernels are swapped in for "
                "models on the NPU. Load it with device_map='npu', or move it there and call "
                "kernels_ext_npu.kernelize(model).",
                stacklevel=4,
            )
        has_config = model.kernel_config is not None or given.get("kernel_config") is not None

        def bind_layers(mode: kernels.Mode) -> None:
            if is_away and is_for_npu_only:  # nobody has asked for kernels of other devices
                return
            if has_config or not waits:
                original(model, use_kernels, *args, **kwargs)
            use_kernels_flag.note(model, was_asked=not is_for_npu_only)
            if waits:
                bind_layers_on_npu(model, mode)

        run(model, given.get("mode"), bind_layers)


def bind_layers_on_npu(model: nn.Module, mode: kernels.Mode) -> None:
    """Let `kernels` bind layers to marked classes for the NPU, by transformers' mapping as it is now."""
    register_kernel_mapping_transformers()
    kernels.kernelize(model, mode=mode, device="npu", use_fallback=kernels.KernelizeFallback.ALL)


def _check_strictly(model: nn.Module) -> None:
    from kernels_ext_npu.reporting.report import report  # most models are loaded without one

    unswapped = [row for row in report(model) if not row.swapped and row.is_candidate]
    if unswapped:
        lines = "\n".join(f"  {row.path} ({row.class_name}): {row.reason}" for row in unswapped[:_AT_MOST])
        count = len(unswapped)
        more = f"\n  and {count - _AT_MOST} more" if count > _AT_MOST else ""
        raise RuntimeError(f"register(strict=True): {count} modules and functions stay as they were\n{lines}{more}")


def outermost(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost transformers models in a module."""
    if isinstance(module, PreTrainedModel):
        yield module
    else:
        for child in module.children():
            yield from outermost(child)
