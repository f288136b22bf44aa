"""Let ``use_kernels=True`` and ``set_use_kernels`` swap our kernels while they are registered."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from kernels import Mode
from transformers import PreTrainedModel

from kernels_ext_npu.binding import registration, use_kernels_flag
from kernels_ext_npu.binding.devices import assume_npu_if_meta, compute_device
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.lifecycle import pipeline


def install(patches: Patches) -> None:
    """Let transformers' ``set_use_kernels`` go through the pipeline."""
    patches.method(PreTrainedModel, "set_use_kernels", _set_use_kernels, registration.is_active)


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

        def bind_layers(mode: Mode) -> None:
            if is_away and is_for_npu_only:  # nobody has asked for kernels of other devices
                return
            if has_config or not waits:
                original(model, use_kernels, *args, **kwargs)
            use_kernels_flag.note(model, was_asked=not is_for_npu_only)
            if waits:
                pipeline.bind_layers_on_npu(model, mode)

        pipeline.run(model, given.get("mode"), bind_layers)
