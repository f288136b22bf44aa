"""The registration of this process: the arguments of register(), and the state that lives until unregister()."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.distribution import sources

if TYPE_CHECKING:
    from torch import nn


@dataclass
class Registration:
    """Holds the arguments of register(), and what was changed and found since."""

    source: str | Path  # where the kernels come from
    strict: bool  # whether a model raises that keeps what a kernel might serve
    kernels: frozenset[str]  # the repositories that register() was to use
    # swaps kernels into a model at its first call; None unless register(everywhere=True) was called
    on_first_call: Callable[[nn.Module], None] | None = None
    over_packages: bool = False  # whether kernels go before packages that transformers lets compute its functions
    patches: Patches = field(default_factory=Patches)  # our changes to transformers, `kernels` and models
    # the module that `kernels` made of each function
    functions: dict[FunctionType, nn.Module] = field(default_factory=dict)
    function_layers: dict[nn.Module, str] = field(default_factory=dict)  # which layer serves each of these, if one does
    # which layer is to serve each module of the model that is being swapped, None for none; empty at other times
    module_layers: dict[nn.Module, str | None] = field(default_factory=dict)
    # the packages that were loaded for more than layers, by repository
    packages: dict[str, ModuleType] = field(default_factory=dict)
    # the repositories that could not be loaded when they were tried, until kernels are swapped into a model again
    unloadable: set[str] = field(default_factory=set)
    # models whose kernels are swapped in at their first call on the NPU
    waiting: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)


current: Registration | None = None
# the modules of parts of a model that restore() was called for: they stay as they are while the rest is looked at again
restored: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def package(repository: str) -> ModuleType:
    """Return the package of a kernel repository of the registration, which is loaded when it is first asked for."""
    assert current is not None
    if repository not in current.packages:
        current.packages[repository] = sources.load_package(current.source, repository)
    return current.packages[repository]


def try_package(repository: str) -> ModuleType | None:
    """Return the package of a kernel repository of the registration; None without one, or if it cannot be loaded.

    While a graph is captured or compiled it would be too late to load it. What is wrong is said by `package`; here it
    is tried once between two swaps, since any call of torch's may ask, and a Hub that does not answer takes its time.
    """
    if current is None or repository in current.unloadable:
        return None
    try:
        return package(repository)
    except Exception:
        current.unloadable.add(repository)
        return None


def is_active() -> bool:
    """Tell whether kernels are registered."""
    return current is not None


def uses(repository: str) -> bool:
    """Tell whether kernels are registered, among them those of a repository."""
    return current is not None and repository in current.kernels
