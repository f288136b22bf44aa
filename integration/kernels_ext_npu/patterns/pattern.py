"""Patterns: the name of a forward of transformers, the layers that compute the same, and their limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS, Kind
from kernels_ext_npu.module_state import static_getattr

Limits = Callable[[Any], "str | None"]  # says why no layer serves an instance; None if one does


class Guard(NamedTuple):
    """A condition on instances that is asked in every call too, since what it looks at may be changed later."""

    holds: Callable[[Any], bool]
    reason: str  # why an instance is refused for which it does not hold; ``{0}`` in it is the instance


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
    classes: tuple[str, ...]  # the submodule's forward has to be that of one of these
    reason: str  # the refusal of another class; ``{}`` in it is the name of that class
    is_called: bool = False  # whether the layer calls it, so that its hooks run


@dataclass(frozen=True)
class Pattern:
    """A forward or a function of transformers that a kernel can replace."""

    name: str  # in matching/known_forwards.json: where transformers has it
    layers: tuple[str, ...]  # the layers that serve it, each with an entry in transformers' mapping
    limits: Limits = lambda _: None  # refuses instances for reasons that a fingerprint does not show
    choose: Callable[[nn.Module], str] | None = None  # chooses one of several layers for an instance
    parts: tuple[Part, ...] = ()  # submodules whose classes are compared too
    guard: Guard | None = None
    # whether the layer itself checks in every forward what `limits` looks at
    rechecks_every_call: bool = False
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

    @property
    def is_function(self) -> bool:
        """Tell whether it is a function, whose parameter names are compared too."""
        return self.name.partition(":")[2].islower()

    def layer_for(self, module: nn.Module) -> str:
        """Return the layer that serves an instance, or would if nothing stood against it."""
        return self.choose(module) if self.choose else self.layers[0]
