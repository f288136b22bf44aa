"""What CANN's operators do behind a launch: the kernels that a call is on the device, and the bytes that these move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.measuring.inside import (  # noqa: F401  their rows
    activations,
    attention,
    experts,
    indexing,
    losses,
    norms,
    products,
    updates,
)
from kernels_ext_npu.measuring.inside.table import ROWS, Call, Kernel, Row, nbytes
from kernels_ext_npu.measuring.products import arguments, name_of


@dataclass(frozen=True)
class Inside:
    """What runs on the device for one call.

    Attributes:
        kernels: in their order.
        is_read: whether somebody has read what the operator does; otherwise one kernel is counted.
    """

    kernels: tuple[Kernel, ...]
    is_read: bool = True

    @property
    def moved(self) -> int:
        """The bytes that all of its kernels read and write."""
        return sum(kernel.moved for kernel in self.kernels)

    @property
    def workspace(self) -> int:
        """The bytes that its kernels hand to each other, as if all of them were kept until the call ends."""
        return sum(kernel.workspace for kernel in self.kernels)


def inside(operator: OpOverload, args: tuple, kwargs: dict, result: Any, moved: int, cann: tuple[int, int]) -> Inside:
    """Return what runs on the device for a call.

    Args:
        operator: what is called.
        args: with these arguments.
        kwargs: and these.
        result: what it gives.
        moved: the bytes of the tensors that go in and out, less those that are left unread.
        cann: the release.
    """
    name = name_of(operator)
    found = ROWS.get(name) or ROWS.get(name.rstrip("_"))
    if found is None:
        return Inside((Kernel(name, moved, is_main=True),), is_read=False)
    call = Call(name, arguments(operator, args, kwargs), tensors(result), moved, cann)
    before, after = _copies(operator, call, found)
    return Inside((*before, *found.kernels(call), *after))


def _copies(operator: OpOverload, call: Call, found: Row) -> tuple[list[Kernel], list[Kernel]]:
    """Return the copies of operands that do not lie as the kernel wants them, and of results back to where they lie.

    CANN's ops-math, conversion/contiguous/op_host/op_api/contiguous.cpp: a slice, a transpose or a broadcast into the
    workspace, one kernel each; ``l0op::ViewCopy`` writes back.
    """
    before, after = [], []
    for argument in operator._schema.arguments:
        for operand in tensors(call.given.get(argument.name)):
            if operand.is_contiguous() or not operand.numel() or found.reads_in_place(operand):
                continue
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not argument.is_out:
                before.append(Kernel("Contiguous", _held(operand) + nbytes(operand), workspace=nbytes(operand)))
            if is_written:
                after.append(Kernel("ViewCopy", 2 * nbytes(operand)))
    return before, after


def _held(operand: Tensor) -> int:
    """Return the bytes that a tensor has in memory: along dimensions that are expanded one element for all."""
    elements = 1
    for size, stride in zip(operand.shape, operand.stride()):
        elements *= 1 if stride == 0 else size
    return elements * operand.element_size()
