"""Models that somebody else loads: kernels are swapped in when such a model is first called on the NPU.

Frameworks load models without ``use_kernels=True`` and then move, cast, adapt and shard them, each in its own order.
At the first forward all of that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kernels_ext_npu.binding import registration, use_kernels_flag
from kernels_ext_npu.binding.patches import Patches


def install(patches: Patches) -> None:
    """Let every transformers model that is made from now on wait for its first forward on the NPU."""
    patches.method(PreTrainedModel, "__init__", _wait, registration.is_active)


def _wait(original: Callable, model: Any, *args: Any, **kwargs: Any) -> None:
    original(model, *args, **kwargs)
    if registration.current is not None and registration.current.on_first_call is not None:
        model.register_forward_pre_hook(swap)
        registration.current.waiting.add(model)


def waits(model: nn.Module) -> bool:
    """Tell whether the kernels are to be swapped into a model when it is called."""
    return any(hook is swap for hook in model._forward_pre_hooks.values())


def forget(model: nn.Module) -> None:
    """Let a model no longer wait. Not by the handle of the hook: copies of models have the hook, but no handle."""
    if registration.current is not None:
        registration.current.waiting.discard(model)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is swap:
            del model._forward_pre_hooks[key]


@torch.compiler.disable
def swap(called: nn.Module, args: Any) -> None:
    """Swap kernels into the outermost model that the called one is part of: the hook."""
    active = registration.current
    if active is None or active.on_first_call is None:  # a copy of a model that waited
        forget(called)
        return
    if not any(tensor.device.type == "npu" for tensor in chain(called.parameters(), called.buffers())):
        return
    model = _outermost(called, active.waiting)
    for module in model.modules():
        forget(module)
    if not use_kernels_flag.is_noted(model):
        active.on_first_call(model)


def _outermost(called: nn.Module, waiting: Iterable[nn.Module]) -> nn.Module:
    """Find the outermost of the models that wait and that the called one is part of.

    Some call the forward of a model and not the model, and then only the models inside it notice.
    """
    around = [model for model in waiting if any(module is called for module in model.modules())]
    return max(around, key=lambda model: sum(1 for _ in model.modules()), default=called)
