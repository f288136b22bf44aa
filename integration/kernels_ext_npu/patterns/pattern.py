"""Patterns: a forward as transformers writes it, the layers that compute the same, and their limits."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import nn

from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS, Kind
from kernels_ext_npu.module_state import static_getattr

_source = cache(inspect.getsource)  # many are changes of the same few
Limits = Callable[[Any], "str | None"]  # says why no layer serves an instance; None if one does


def require(holds: Callable[[Any], bool], reason: str, then: Limits = lambda _: None) -> Limits:
    """Return limits that refuse instances for which a condition does not hold.

    Args:
        holds: tells whether it holds for an instance.
        reason: the refusal; ``{0}`` in it is the instance.
        then: further limits, for instances for which it holds.
    """
    return lambda module: then(module) if holds(module) else reason.format(module)


def ignores(then: Limits = lambda _: None, **members: object) -> Limits:
    """Return limits that refuse instances with attributes that the layer reads and the forward ignores.

    Args:
        then: further limits.
        members: for each attribute the value with which the layer computes what the forward does, which is allowed.
    """

    def refuse(module: Any) -> str | None:
        for name, value in members.items():
            found = static_getattr(module, name)
            if found is not None and not (isinstance(found, (int, float)) and found == value):
                return misread(name, None)
        return then(module)

    return refuse


def misread(taken: str | None, named: str | None) -> str:
    """Say that the layer would read the member ``taken`` where the forward reads ``named``; None is no member."""
    if taken is None:
        return f"its {named} is no member of the module itself, where the kernel looks for it"
    return f"it has a member {taken} that its forward does not read, and the kernel would"


@dataclass(frozen=True)
class Part:
    """A submodule whose class the layer relies on, mostly since it computes it without a call."""

    name: str  # the attribute; in a ModuleList each element counts
    classes: tuple[type[nn.Module], ...]  # the submodule's forward has to be that of one of these
    reason: str  # the refusal of another class; ``{}`` in it is the name of that class
    is_called: bool = False  # whether the layer calls it, so that its hooks run


@dataclass(frozen=True)
class Pattern:
    """A forward or a function of transformers that a kernel can replace."""

    # the class whose forward is compared; or the function, whose parameter names are compared too
    original: Any
    layers: tuple[str, ...]  # the layers that serve it, each with an entry in transformers' mapping
    limits: Limits = lambda _: None  # refuses instances for reasons that the syntax tree does not show
    choose: Callable[[nn.Module], str] | None = None  # chooses one of several layers for an instance
    parts: tuple[Part, ...] = ()  # submodules whose classes are compared too
    # the guard that is asked in every call, where what `limits` looks at may be changed later
    holds: Callable[[Any], bool] | None = None
    # whether the layer itself checks in every forward what `limits` looks at
    rechecks_every_call: bool = False
    # whether the result may have gradients; if not, a decorator torch.no_grad is no difference
    has_gradients: bool = True
    # its file has to have a function of one of these names that transformers itself computes, not a package
    sibling_functions: tuple[str, ...] = ()

    @property
    def repository(self) -> str:
        """The kernel repository that holds the layers."""
        return LAYERS[self.layers[0]]

    @property
    def kind(self) -> Kind:
        """The kind that its modules or functions are counted among."""
        return KIND_OF_LAYER[self.layers[0]]

    def layer_for(self, module: nn.Module) -> str:
        """Return the layer that serves an instance, or would if nothing stood against it."""
        return self.choose(module) if self.choose else self.layers[0]


def patterns_for(layers: tuple[str, ...], *originals: Any, **terms: Any) -> tuple[Pattern, ...]:
    """Return a pattern for each original, with the same layers and the same further fields of `Pattern`."""
    return tuple(map(partial(Pattern, layers=layers, **terms), originals))


def reworded(name: str, base: Any, changes: dict[str, str], method: str = "forward") -> Any:
    """Return a copy of a function, or a subclass with a copy of a method, whose source has some words replaced.

    It belongs to the module of the original. inspect, tracebacks and torch.compile find its source.

    Example:
        >>> blt = reworded("blt", llama, {"rotate_half": "rotate_neighbours"})

    Args:
        name: the name of the result, which has to be new in the file.
        base: the function or class that is copied.
        changes: old words -> new words, replaced wherever they stand.
        method: the method of a class that is copied.

    Raises:
        ValueError: the words are not in the source, or the name is taken.
    """
    original = getattr(base, method) if isinstance(base, type) else base
    source = textwrap.dedent(_source(original))
    for old, new in changes.items():
        if old not in source:
            raise ValueError(f"{original.__qualname__} has no {old!r}")
        source = source.replace(old, new)
    if original is base:
        source = source.replace(f"def {base.__name__}(", f"def {name}(")
    file = f"<{original.__module__}.{name}>"
    if file in linecache.cache:
        raise ValueError(f"there is a {file} already, whose source would be read in place of this one")
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), vars(sys.modules[base.__module__]), made)
    (written,) = made.values()
    return written if original is base else type(name, (base,), {method: written, "__module__": base.__module__})
