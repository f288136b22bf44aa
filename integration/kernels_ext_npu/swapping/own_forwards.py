"""Forwards that modules get one by one, whatever their class: put in, found again, and taken out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType

from torch import nn

from kernels_ext_npu.swapping import ahead
from kernels_ext_npu.swapping.loaded import marked, owner_of


@dataclass(frozen=True)
class OwnForwards:
    """The modules of a model that get a forward which one file of this room has written.

    Attributes:
        owner: what the forward is marked with.
        find: gives the modules that may get it, each with its path and why it does not; None if it does.
        make: gives the forward.
    """

    owner: str
    find: Callable[[nn.Module], Iterator[tuple[str, nn.Module, str | None]]]
    make: Callable[[], FunctionType]

    def take(self, model: nn.Module) -> None:
        """Give the forward to the modules of a model that may have it, and take it out of the others."""
        served = set()
        for _, module, reason in self.find(model):
            if reason is not None:
                self.take_out(module)
                continue
            served.add(module)
            if not self.is_swapped(module):
                module.forward = MethodType(marked(self.make(), self.owner), module)  # type: ignore[method-assign]
        ahead.note(model, served)

    def restore(self, model: nn.Module) -> None:
        """Give all modules of a model the forward of their class."""
        for module in model.modules():
            self.take_out(module)

    def take_out(self, module: nn.Module) -> None:
        """Give a module the forward of its class, if it has the one of these."""
        if self.is_swapped(module):
            del module.forward
            ahead.forget(module)

    def is_swapped(self, module: nn.Module) -> bool:
        """Tell whether a module has the forward."""
        return owner_of(module) == self.owner
