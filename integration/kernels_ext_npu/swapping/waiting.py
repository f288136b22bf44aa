"""Kernels for models that somebody else loads: swapped in when a model is first called on the NPU.

Frameworks load models without ``use_kernels=True`` and then move, cast, adapt and shard them, each in its own order.
At the first forward all of that is done.
"""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("kernels_ext_npu")

# the models that were not called on the NPU yet
_waiting: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_undo: list[Callable[[], None]] = []


def install() -> None:
    """From now on every transformers model that is made waits for its first forward on the NPU."""
    from transformers import PreTrainedModel

    original: Any = PreTrainedModel.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        if _undo:
            self.register_forward_pre_hook(swap)
            _waiting.add(self)

    def undo() -> None:
        if PreTrainedModel.__init__ is __init__:  # if others have wrapped it, ours stays below and does nothing
            PreTrainedModel.__init__ = original  # type: ignore[method-assign]

    PreTrainedModel.__init__ = __init__  # type: ignore[method-assign]
    _undo.append(undo)


def remove() -> None:
    """Models that are made from now on do not wait, nor do those that wait."""
    while _undo:
        _undo.pop()()
    for model in list(_waiting):
        forget(model)


def waits(model: nn.Module) -> bool:
    """Whether the kernels are to be swapped into a model when it is called."""
    return any(hook is swap for hook in model._forward_pre_hooks.values())


def forget(model: nn.Module) -> None:
    """Let a model no longer wait. Not by the handle of the hook: copies of models have the hook, but no handle."""
    _waiting.discard(model)
    for key, hook in list(model._forward_pre_hooks.items()):
        if hook is swap:
            del model._forward_pre_hooks[key]


@torch.compiler.disable
def swap(called: nn.Module, args: Any) -> None:
    """The hook: swaps kernels into the outermost model that the called one is part of."""
    from kernels_ext_npu.api import register
    from kernels_ext_npu.api.kernelize import kernelize
    from kernels_ext_npu.reporting.report import report

    if register.current is None:  # a copy of a model that waited
        forget(called)
        return
    if not any(tensor.device.type == "npu" for tensor in _tensors(called)):
        return
    model = _outermost(called)
    for module in model.modules():
        forget(module)
    forget(called)
    if vars(model).get("_use_kernels"):
        return
    kernelize(model)
    level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.DEBUG
    logger.log(level, "kernels-ext-npu: %s at its first forward:\n%s", type(model).__name__, report(model))


def _outermost(called: nn.Module) -> nn.Module:
    """Some call the forward of a model and not the model, and then only the models inside it notice."""
    around = [model for model in _waiting if any(module is called for module in model.modules())]
    return max(around, key=lambda model: sum(1 for _ in model.modules()), default=called)


def _tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    return chain(model.parameters(), model.buffers())
