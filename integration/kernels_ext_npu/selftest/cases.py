"""Cases of the selftest: a function or layer of a kernel, its arguments, and the expected result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels_ext_npu.selftest import comparing
from kernels_ext_npu.selftest.comparing import Difference, Results

Arguments = Callable[[], tuple[Tensor, ...]]
Shapes = Sequence[tuple[int, ...]]


class _Titled:
    name: str
    at: str

    @property
    def title(self) -> str:
        """The name of the case in a report."""
        return f"{self.name}, {self.at}" if self.at else self.name


@dataclass(frozen=True)
class Function(_Titled):
    """A function of a repository, how it is called, and its formula."""

    repository: str  # the repository
    name: str  # what its package exports
    call: Callable[..., Any]  # takes the function and arguments on the NPU
    exact: Callable[..., Any]  # takes the arguments on the host, in float64
    arguments: Arguments  # makes them, in float32
    at: str = ""  # which limit the arguments are at; nothing for those that every machine has to take

    def compare(self, kernel: ModuleType, dtype: torch.dtype, device: str = "npu") -> Difference:
        """Compute it on a device and on the host, and return how far they are apart."""
        return comparing.difference(*self.compute(getattr(kernel, self.name), self.exact, dtype, device))

    def compute(
        self, function: Callable, exact: Callable, dtype: torch.dtype, device: str = "npu"
    ) -> tuple[Results, Results]:
        """Return what a function gives that is called like this one, and what it has to give by an exact one."""
        arguments = comparing.rounded(self.arguments(), dtype)
        found = comparing.results(partial(self.call, function), comparing.moved(arguments, device))
        return found, comparing.exact(exact, arguments)


@dataclass(frozen=True)
class Layer(_Titled):
    """A layer of a repository, and how it and what it takes the place of are computed."""

    repository: str  # the repository
    name: str  # what it is called in ``layers``
    # takes the class of the layer and a dtype, and returns what it gives and what it has to give
    compute: Callable[[type, torch.dtype], tuple[Results, Results]]
    at: str = ""  # what it takes the place of, where there are several

    def compare(self, kernel: ModuleType, dtype: torch.dtype) -> Difference:
        """Compute it on the NPU and on the host, and return how far they are apart."""
        return comparing.difference(*self.compute(getattr(kernel.layers, self.name), dtype))


Case = Function | Layer


def at_limits(
    repository: str, name: str, call: Callable[..., Any], exact: Callable[..., Any], shapes: Mapping[str, Shapes]
) -> list[Function]:
    """Make a case of a function for each of some shapes of its arguments, by the limit that they are at."""
    return [Function(repository, name, call, exact, drawn(*given), at) for at, given in shapes.items()]


def drawn(*shapes: tuple[int, ...], scale: float = 1.0) -> Arguments:
    """Draw tensors, the same each time."""

    def draw() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(scale * torch.randn(shape, generator=generator) for shape in shapes)

    return draw
