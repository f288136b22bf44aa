"""What CANN's operators do behind a launch: the kernels that a call is on the device, and the bytes that these move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch._ops import OpOverload

from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.measuring.inside import aten, npu  # noqa: F401  their rows
from kernels_ext_npu.measuring.inside.strided import contiguous, view_copy
from kernels_ext_npu.measuring.inside.table import ROWS, Call, Kernel, Row
from kernels_ext_npu.measuring.products import arguments, operator_name


@dataclass(frozen=True)
class Inside:
    """What runs on the device for one call.

    Attributes:
        kernels: in their order.
        outside: the bytes of what goes in and out of the call, once.
        is_read: whether somebody has read what the operator does; otherwise one kernel is counted.
    """

    kernels: tuple[Kernel, ...]
    outside: int
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
    name = operator_name(operator)
    found = ROWS.get(name) or ROWS.get(name.rstrip("_"))
    if all(tensor.device.type == "cpu" for tensor in tensors((args, kwargs, result))):
        return Inside((Kernel(name, moved, is_main=True),), moved)  # the host's
    if found is None:
        return Inside((Kernel(name, moved, is_main=True),), moved, is_read=False)
    call = Call(name, arguments(operator, args, kwargs), tensors(result), moved, cann)
    before, after = _copies(operator, call, found)
    return Inside((*before, *found.kernels(call), *after), moved)


def _copies(operator: OpOverload, call: Call, found: Row) -> tuple[list[Kernel], list[Kernel]]:
    """Return the copies of operands that do not lie as the kernel wants them, and of results back to where they lie."""
    before: list[Kernel] = []
    after: list[Kernel] = []
    for argument in operator._schema.arguments:
        for operand in tensors(call.given.get(argument.name)):
            if operand.is_contiguous() or not operand.numel() or found.reads_in_place(operand):
                continue
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not argument.is_out:
                before.extend(contiguous(operand))
            if is_written:
                after.append(view_copy(operand))
    return before, after
