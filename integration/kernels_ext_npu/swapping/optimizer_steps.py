"""Notices the steps of optimizers: on the NPU those that are fused write to weights without telling autograd.

A tensor's version, by which autograd notices changes, stays what it was.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

_watched: weakref.WeakKeyDictionary[Any, tuple[Tensor, Callable[[Any], None]]] = weakref.WeakKeyDictionary()
_handle: Any = None


def watch(owner: Any, weight: Tensor, on_step: Callable[[Any], None]) -> None:
    """Call `on_step(owner)` when an optimizer of a weight has taken a step, while the owner lives."""
    global _handle
    if _handle is None:
        _handle = register_optimizer_step_post_hook(_note)
    _watched[owner] = weight, on_step


def _note(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if _watched:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for owner, (weight, on_step) in list(_watched.items()):
            if id(weight) in stepped:
                on_step(owner)
