"""The protocol of swaps: how one kind of kernel gets into a model, out of it, and into the report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from kernels_ext_npu.binding.forward_binding import bound_layer, own_forward
from kernels_ext_npu.binding.loaded_kernels import package
from kernels_ext_npu.binding.registration import Registration

if TYPE_CHECKING:
    from kernels import Mode


@dataclass(frozen=True)
class Row:
    """One module, or one function that a module calls.

    Attributes:
        path: its name in the model; of a function that of the module, a dot, and the name in its file.
        class_name: its class, or the function.
        kernel: the layer that serves it or would serve it, None if there is none; of attention the name of the
            implementation.
        swapped: whether the kernel's forward is in place.
        reason: why not, or why not as fast as it could be; None if there is nothing to say.
        is_candidate: whether one would expect a kernel for it; not so for a LayerNorm, nor for frequencies that change,
            nor for what register(kernels=...) leaves out.
        kind: what it is, as the table counts it.
        function: the name of the function in its file, None for a module.
    """

    path: str
    class_name: str
    kernel: str | None
    swapped: bool
    reason: str | None
    is_candidate: bool = True
    kind: str = "norms"
    function: str | None = None

    @property
    def module(self) -> str:
        """The name in the model of the module, or of the module that calls the function."""
        return self.path if self.function is None else self.path[: -len(self.function)].rstrip(".")


@dataclass(frozen=True)
class Swapping:
    """The context of one swap of kernels into a model."""

    registration: Registration  # what register() was told
    mode: Mode  # whether the model is trained or infers, as `kernels` knows it
    bind_layers: Callable[[Mode], None]  # lets `kernels` bind layers to marked classes, by transformers' mapping
    by_class: dict[type[nn.Module], list[nn.Module]]  # the model's modules by class

    @functools.cached_property
    def modules(self) -> list[nn.Module]:
        """The modules of the model."""
        return list(chain.from_iterable(self.by_class.values()))

    @functools.cached_property
    def placed(self) -> list[tuple[nn.Module, str, Any]]:
        """The modules that layers of ours compute, each with its layer and package: for swaps after that of layers."""
        swapped = [module for module in self.modules if "forward" in vars(module)]
        placed = [(module, layer) for module in swapped if (layer := bound_layer(module)) is not None]
        return [(module, layer, package(own_forward(module))) for module, layer in placed]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Swap:
    """One kind of kernel, and how it gets into a model, out of it, and into the report."""

    name: str  # the name of the kind
    apply: Callable[[nn.Module, Swapping], None]  # swaps into a model; what is as it should be is left alone
    # changes transformers when kernels are registered, through `registration.patches`
    install: Callable[[Registration], None] = lambda _: None
    # undoes what `apply` did to a model or a part of one, but for forwards: that of layers takes all out
    revert: Callable[[nn.Module], None] = lambda _: None
    rows: Callable[[nn.Module], Iterable[Row]] = lambda _: ()  # says what was swapped in a model, what not, and why
