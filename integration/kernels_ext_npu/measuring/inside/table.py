"""The table of what CANN's operators do behind a launch: its rows, and how a row is written.

A row tells, for the calls of an operator, the kernels that its ``aclnn`` function and op-plugin run on the device, with
the bytes that each reads and writes. Its docstring is the sentence of the table in docs/inside.md, its source what was
read. Releases are those of CANN; 8.2 and 8.3 are not public, and stand as 8.5 does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Kernel:
    """A kernel that the device runs.

    Attributes:
        name: its name in CANN, such as ``MatMulV3``.
        moved: the bytes that it reads and writes.
        workspace: how many of those it writes are for the next kernel alone, and no result of the call.
        is_main: whether it computes what the operator is called for, and so its products; others copy, cast or
            transpose for it.
        on_ai_cpu: whether it runs on the AI CPU, a few scalar cores: no estimate of its time holds.
    """

    name: str
    moved: int
    workspace: int = 0
    is_main: bool = False
    on_ai_cpu: bool = False


@dataclass(frozen=True)
class Call:
    """A call of an operator.

    Attributes:
        name: the operator, without its namespace and overload: ``add_``.
        given: its arguments by their names in the schema, and the defaults of those that were not given.
        results: the tensors that it gives.
        moved: the bytes of the tensors that it takes and gives, less those that it leaves unread.
        cann: the release, such as ``(9, 1)``.
    """

    name: str
    given: dict[str, Any]
    results: list[Tensor]
    moved: int
    cann: tuple[int, int]

    @property
    def result(self) -> Tensor:
        """The first tensor that it gives."""
        return self.results[0]

    def tensor(self, *names: str) -> Tensor:
        """Return the first of some arguments that the operator has and that is a tensor."""
        return next(value for name in names if isinstance(value := self.given.get(name), Tensor))

    def operands(self, *names: str) -> list[Tensor]:
        """Return the operands on the device: op-plugin hands numbers over as numbers, tensors on the host too."""
        given = (self.given.get(name) for name in names)
        return [value for value in given if isinstance(value, Tensor) and value.device.type != "cpu"]

    def main(self, name: str, moved: int | None = None, workspace: int = 0, on_ai_cpu: bool = False) -> Kernel:
        """Return the kernel that computes. It moves what goes in and out, unless a number is given."""
        return Kernel(name, self.moved if moved is None else moved, workspace, is_main=True, on_ai_cpu=on_ai_cpu)


# tells of an operand that is not contiguous whether the kernel reads and writes it as it lies
ReadInPlace = Callable[[Tensor], bool]


@dataclass(frozen=True)
class Row:
    """What runs on the device for the calls of some operators.

    Attributes:
        operators: their names, without namespace and overload; ``add`` stands for ``add_`` too.
        kernels: gives the kernels of a call with contiguous operands. One of them is the main one, or several that are
            products of equal size.
        source: what was read: a repository of CANN or op-plugin, a path in it, and lines by branch.
        reads_in_place: of strided operands, which the kernel takes as they lie; the others are copied before it.
    """

    operators: tuple[str, ...]
    kernels: Callable[[Call], Iterable[Kernel]]
    source: str
    reads_in_place: ReadInPlace


ROWS: dict[str, Row] = {}  # by the name of the operator


def never(_: Tensor) -> bool:
    """Strided operands are copied: ``l0op::Contiguous`` before the kernel."""
    return False


def always(_: Tensor) -> bool:
    """Strided operands are read as they lie."""
    return True


def if_transposed(operand: Tensor) -> bool:
    """Operands of products are read as they lie if their last two dimensions are swapped, and nothing else is."""
    return operand.dim() > 1 and operand.transpose(-2, -1).is_contiguous()


def row(*operators: str, source: str, reads_in_place: ReadInPlace = never) -> Callable:
    """Make a function from a call to its kernels the row of some operators."""

    def add(kernels: Callable[[Call], Iterable[Kernel]]) -> Callable[[Call], Iterable[Kernel]]:
        found = Row(operators, kernels, source, reads_in_place)
        for name in operators:
            if name in ROWS:
                raise ValueError(f"{name} has two rows")
            ROWS[name] = found
        return kernels

    return add


def one_kernel(*operators: str, kernel: str, source: str, reads_in_place: ReadInPlace = never) -> None:
    """Add a row of operators for which a single kernel runs, which hides nothing."""

    def kernels(call: Call) -> Iterable[Kernel]:
        yield call.main(kernel)

    kernels.__doc__ = f"{kernel}."
    row(*operators, source=source, reads_in_place=reads_in_place)(kernels)


def nbytes(tensor: Tensor, dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a tensor, as if it were of another dtype where one is given."""
    return tensor.numel() * (dtype or tensor.dtype).itemsize


def promoted(operands: Iterable[Tensor]) -> torch.dtype:
    """Return the dtype to which tensors promote."""
    return reduce(torch.promote_types, (operand.dtype for operand in operands))


def cast(tensor: Tensor, dtype: torch.dtype) -> Iterable[Kernel]:
    """Give the kernel that casts a tensor into the workspace; none where it has the dtype already."""
    if tensor.dtype is not dtype:
        yield Kernel("Cast", nbytes(tensor) + nbytes(tensor, dtype), workspace=nbytes(tensor, dtype))


def computed(
    call: Call, kernel: str, operands: list[Tensor], dtype: torch.dtype, gives: torch.dtype | None = None
) -> Iterable[Kernel]:
    """Give the kernels of an operator that casts its operands to a dtype, computes, and casts to that of its result.

    ``gives`` is the dtype of what the kernel writes, where it is another one: comparisons write booleans.
    """
    for operand in operands:
        yield from cast(operand, dtype)
    yield from written(call, kernel, sum(nbytes(operand, dtype) for operand in operands), gives or dtype)


def written(call: Call, kernel: str, read: int, dtype: torch.dtype, on_ai_cpu: bool = False) -> Iterable[Kernel]:
    """Give the kernel that reads so many bytes and writes the result in a dtype, and the cast to that of the result."""
    result, size = call.result, nbytes(call.result, dtype)
    is_cast = result.dtype is not dtype
    yield call.main(kernel, read + size, workspace=size * is_cast, on_ai_cpu=on_ai_cpu)
    if is_cast:
        yield Kernel("Cast", size + nbytes(result))
