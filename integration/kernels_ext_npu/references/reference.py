"""What a reference says: what is compared, and which layer takes its place on which instances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

from torch import nn

from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS, Kind


@dataclass(frozen=True)
class Reference:
    """A forward that a kernel can take the place of.

    Attributes:
        module: the class whose forward is compared.
        layers: the layers of the kernel repository that serve it, each with an entry in transformers' mapping.
        refuse: why no layer can serve an instance, or None if one can: what the syntax tree does not show.
        choose: the layer for an instance, None for one that is refused.
        sees_changes: whether the layer looks in every forward at what `refuse` looks at, and computes what is right.
    """

    module: type[nn.Module]
    layers: tuple[str, ...]
    refuse: Callable[[nn.Module], str | None]
    choose: Callable[[nn.Module], str | None]
    sees_changes: bool = False

    @property
    def repository(self) -> str:
        """The kernel repository that holds the layers."""
        return LAYERS[self.layers[0]]

    @property
    def kind(self) -> Kind:
        """The kind that its modules are counted among."""
        return KIND_OF_LAYER[self.layers[0]]

    def layer(self, module: nn.Module) -> str:
        """Return the layer that serves an instance, or would if nothing stood against it."""
        return self.choose(module) or self.layers[0]


def always(module: type[nn.Module], layer: str) -> Reference:
    """Return the reference of a forward that one layer serves on every instance."""
    return Reference(module, (layer,), lambda _: None, lambda _: layer)


def unless(
    module: type[nn.Module], layer: str, refuse: Callable[[nn.Module], str | None], sees_changes: bool = False
) -> Reference:
    """Return the reference of a forward that one layer serves, on every instance that is not refused."""
    return Reference(module, (layer,), refuse, lambda m: None if refuse(m) else layer, sees_changes)


@dataclass(frozen=True)
class FunctionReference:
    """A function that a kernel can take the place of.

    Attributes:
        function: the function that is compared, by its body and the names of its parameters.
        layer: the layer of the kernel repository, and its entry in transformers' mapping.
        fits: whether the layer is for a function that computes this, by what else is in its file.
    """

    function: Callable
    layer: str
    fits: Callable[[FunctionType], bool] = lambda _: True

    @property
    def repository(self) -> str:
        """The kernel repository that holds the layer."""
        return LAYERS[self.layer]

    @property
    def kind(self) -> Kind:
        """The kind that its functions are counted among."""
        return KIND_OF_LAYER[self.layer]
