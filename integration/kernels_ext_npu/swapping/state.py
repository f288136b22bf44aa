"""The registration of this process: what register() was told, and what belongs to it until unregister()."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_ext_npu.swapping.patches import Patches

if TYPE_CHECKING:
    from types import FunctionType, ModuleType

    from torch import nn


@dataclass
class Registration:
    """What register() was told, and what was changed and found since.

    Attributes:
        source: where the kernels come from.
        strict: whether a model must not keep what a kernel might serve.
        kernels: the repositories that are used.
        on_first_call: what swaps the kernels into a model that waited for its first call; None if models do not wait.
        over_packages: whether kernels go before installed packages that transformers lets compute its functions.
        patches: the changes to transformers, `kernels` and what belongs to models.
        marked: the classes that were looked at.
        functions: the modules that `kernels` made of functions, by function.
        experts_named: the configs whose owner named an implementation of experts, by id.
        experts_layer: the layer that computes experts by name, once it is loaded.
        attention_kernel: the package that computes attention by name, once it is loaded.
        loss_kernel: the package that computes losses without logits, once it is loaded.
        linear_kernel: the package that computes linear layers that are trained, once it is loaded.
        waiting: the models that were not called on the NPU yet.
        sums: the layers of swapped models that add and norm in one launch, and what residuals.py knows of each.
    """

    source: str | Path
    strict: bool
    kernels: frozenset[str]
    on_first_call: Callable[[nn.Module], None] | None = None
    over_packages: bool = False
    patches: Patches = field(default_factory=Patches)
    marked: set[type] = field(default_factory=set)
    functions: dict[FunctionType, nn.Module] = field(default_factory=dict)
    experts_named: weakref.WeakValueDictionary[int, Any] = field(default_factory=weakref.WeakValueDictionary)
    experts_layer: type[nn.Module] | None = None
    attention_kernel: ModuleType | None = None
    loss_kernel: ModuleType | None = None
    linear_kernel: ModuleType | None = None
    waiting: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)
    sums: weakref.WeakKeyDictionary[nn.Module, Any] = field(default_factory=weakref.WeakKeyDictionary)


current: Registration | None = None
# the modules of parts of a model that restore() was called for: they stay as they are while the rest is looked at again
restored: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def uses(repository: str) -> bool:
    """Tell whether kernels are registered, among them those of a repository."""
    return current is not None and repository in current.kernels
