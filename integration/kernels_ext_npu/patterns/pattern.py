"""What a pattern says: what is compared, and which layer takes its place on which instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS, Kind
from kernels_ext_npu.module_state import static_getattr

Limits = Callable[[Any], "str | None"]  # says why no layer serves an instance; None if one does


def require(holds: Callable[[Any], bool], reason: str, then: Limits = lambda _: None) -> Limits:
    """Return the limits of a condition, and of others behind it.

    Args:
        holds: tells whether it holds for an instance.
        reason: why no layer serves an instance for which it does not, which takes the place of ``{0}``.
        then: what else limits.
    """
    return lambda module: then(module) if holds(module) else reason.format(module)


def ignores(then: Limits = lambda _: None, **members: object) -> Limits:
    """Return the limits of a forward that does not read members which its layer reads where there are any.

    Args:
        then: what else limits.
        members: what each may be, which is what the forward computes.
    """

    def refuse(module: Any) -> str | None:
        for name, value in members.items():
            found = static_getattr(module, name)
            if found is not None and not (isinstance(found, (int, float)) and found == value):
                return misread(name, None)
        return then(module)

    return refuse


def misread(taken: str | None, named: str | None) -> str:
    """Say that the layer would take another member than the forward names, or finds none: None for no member."""
    if taken is None:
        return f"its {named} is no member of the module itself, where the kernel looks for it"
    return f"it has a member {taken} that its forward does not read, and the kernel would"


@dataclass(frozen=True)
class Part:
    """A member of a module whose class a layer relies on, mostly since it computes it itself."""

    name: str  # the attribute; of a list each element counts
    classes: tuple[type[nn.Module], ...]  # those whose forwards are known
    reason: str  # what to say of a member of another class, whose name takes the place of ``{}``
    is_called: bool = False  # whether the layer calls it all the same, so that its hooks run


@dataclass(frozen=True)
class Pattern:
    """A forward or a function that a kernel can take the place of."""

    # the class whose forward is compared, or the function, which is by its body and the names of its parameters
    original: Any
    layers: tuple[str, ...]  # those that serve it, each with an entry in transformers' mapping
    limits: Limits = lambda _: None  # what the syntax tree does not show
    choose: Callable[[nn.Module], str] | None = None  # which of several layers serves an instance within the limits
    parts: tuple[Part, ...] = ()  # the members whose classes count too
    # whether an instance is to be computed by the layer in this call: what `limits` looks at may have been changed
    holds: Callable[[Any], bool] | None = None
    # whether the layer looks in every forward at what `limits` looks at, and computes what is right
    rechecks_every_call: bool = False
    # whether what it computes may have gradients; where not, torch.no_grad over it changes nothing
    has_gradients: bool = True
    # names of functions, one of which has to be in its file and computed by transformers itself, not by a package
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
    """Return the patterns of what the same layers serve on the same terms, which are those of `Pattern`."""
    return tuple([Pattern(original, layers, **terms) for original in originals])
