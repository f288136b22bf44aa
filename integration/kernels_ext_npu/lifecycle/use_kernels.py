"""What ``use_kernels=True`` does while kernels are registered."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any

from kernels import Mode
from transformers import PreTrainedModel

from kernels_ext_npu.binding import registration, use_kernels_flag
from kernels_ext_npu.binding.devices import assume_npu_if_meta, device_of
from kernels_ext_npu.binding.patches import Patches


def install(patches: Patches) -> None:
    """Let transformers' ``set_use_kernels`` go through the pipeline."""
    original: Any = PreTrainedModel.set_use_kernels
    signature = inspect.signature(original)

    @functools.wraps(original)
    def set_use_kernels(self: Any, use_kernels: bool, *args: Any, **kwargs: Any) -> None:
        if use_kernels and registration.current is not None:
            given = signature.bind(self, use_kernels, *args, **kwargs).arguments
            _swap(self, given.get("mode"), functools.partial(original, self, use_kernels, *args, **kwargs), given)
        else:  # also where somebody has wrapped it since unregister(), and ours stays below
            original(self, use_kernels, *args, **kwargs)

    patches.attribute(PreTrainedModel, "set_use_kernels", set_use_kernels)


def _swap(model: Any, mode: Mode | None, take_as_asked: Any, given: dict[str, Any]) -> None:
    from kernels_ext_npu.lifecycle import pipeline  # register() need not wait for what reports are printed with

    if not model.use_kernels:  # train() and eval() look again where it is on already
        registration.restored.difference_update(model.modules())
    with assume_npu_if_meta(model) as without_weights:
        is_here = model.device.type == "npu"
        is_offloaded = not is_here and not without_weights and device_of(model) == "npu"
        is_away = not (is_here or is_offloaded or without_weights)
        if is_away and not use_kernels_flag.is_for_npu_only(model):
            warnings.warn(
                f"use_kernels=True: {type(model).__name__} is on {model.device.type}, and kernels are swapped in for "
                "models on the NPU. Load it with device_map='npu', or move it there and call "
                "kernels_ext_npu.kernelize(model).",
                stacklevel=4,
            )
        has_config = model.kernel_config is not None or given.get("kernel_config") is not None

        def take(mode: Mode) -> None:
            if is_away and use_kernels_flag.is_for_npu_only(model):  # nobody has asked for kernels of other devices
                return
            if is_offloaded and not has_config:  # transformers would take kernels for the CPU, where its weights wait
                model._use_kernels = True
            else:
                take_as_asked()
            if is_offloaded or without_weights:  # of the latter, transformers looked for kernels for meta
                pipeline.take_for_npu(model, mode)

        with use_kernels_flag.noted(model):
            pipeline.run(model, mode, take)
