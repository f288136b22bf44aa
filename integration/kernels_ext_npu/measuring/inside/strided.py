"""What it takes to read a tensor that is not contiguous, and to write one: the kernels of CANN's ops-math,
conversion/contiguous/op_host/op_api/contiguous.cpp 8.5.0, 9.0.0:584-698 9.1.0:598-720.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from operator import itemgetter

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import Kernel, nbytes

_ALIGNED = 64  # elements of a last dimension that AsStrided moves at once


def contiguous(operand: Tensor) -> Iterable[Kernel]:
    """Give the kernels that lay a tensor out for the next one: a slice, a transpose, a broadcast, whichever it needs.

    A slice that is transposed as well is two kernels, unless rows of its last dimension can be moved as they are.
    """
    steps = [(size, stride) for size, stride in zip(operand.shape, operand.stride()) if size > 1 and stride]
    taken = operand.element_size()  # bytes of what lies there, without what is expanded
    for size, _ in steps:
        taken *= size
    is_sliced = not _is_dense(steps)
    is_permuted = any(before < after for (_, before), (_, after) in pairwise(steps))
    if is_sliced and is_permuted and not (operand.stride(-1) == 1 and operand.shape[-1] % _ALIGNED == 0):
        yield Kernel("Slice", 2 * taken, workspace=taken)
        yield Kernel("Transpose", 2 * taken, workspace=taken)
    elif is_sliced or is_permuted:
        yield Kernel("Transpose" if is_permuted else "Slice", 2 * taken, workspace=taken)
    whole = nbytes(operand)
    if whole == taken:
        return
    if operand.dtype is torch.bool:  # no kernel broadcasts booleans
        yield Kernel("Cast", 5 * taken, workspace=4 * taken)
        yield Kernel("BroadcastTo", 4 * taken + 4 * whole, workspace=4 * whole)
        yield Kernel("Cast", 5 * whole, workspace=whole)
    else:
        yield Kernel("BroadcastTo", taken + whole, workspace=whole)


def view_copy(result: Tensor) -> Kernel:
    """Return the kernel that writes from a contiguous workspace to where a tensor lies.

    Where its elements fill what they lie in, this is a transpose; elsewhere ViewCopy, on the AI CPU for some strides:
    ``IsAiCoreSupport`` of ops-math, conversion/view_copy/op_api/view_copy.cpp 9.1.0:130-177, the same in 8.5.0.
    """
    steps = [(size, stride) for size, stride in zip(result.shape, result.stride()) if size > 1]
    if all(stride for _, stride in steps) and _is_dense(steps):
        return Kernel("Transpose", 2 * nbytes(result))
    return Kernel("ViewCopy", 2 * nbytes(result), on_ai_cpu=not _is_ai_core(result))


def _is_dense(steps: list[tuple[int, int]]) -> bool:
    """Tell whether dimensions lie without gaps, in whatever order."""
    expected = 1
    for size, stride in sorted(steps, key=itemgetter(1)):
        if stride != expected:
            return False
        expected *= size
    return True


def _is_ai_core(result: Tensor) -> bool:
    """Tell whether the AI Core kernel takes the strides of a tensor that is written.

    It takes three or four merged dimensions whose rows are 32 elements or more; and those that leave gaps behind one
    dimension alone. Two cases of three dimensions that overlap are left out here: nobody writes to such tensors.
    """
    if result.dtype is torch.float64 or result.is_complex():
        return False
    sizes, strides = list(result.shape), list(result.stride())
    merged, row = _merged(sizes, strides)
    if 3 <= merged <= 4 and row >= 32:
        return True
    if merged < 0:
        return False
    dense = [1] * len(sizes)
    for index in reversed(range(len(sizes) - 1)):
        dense[index] = dense[index + 1] * sizes[index + 1]
    gaps = [stride - expected for stride, expected in zip(strides, dense)]
    first = next((index for index in reversed(range(len(gaps))) if gaps[index]), None)
    if first is None:
        return False
    gap = gaps[first]
    for index in reversed(range(first)):
        gap *= sizes[index + 1]
        if gaps[index] != gap:
            return False
    return True


def _merged(sizes: list[int], strides: list[int]) -> tuple[int, int]:
    """Return how many dimensions are left when those that follow each other are one, or -1 if rows are torn apart,
    and how many elements lie in a row."""
    count, size, stride, row = 0, 1, 1, 0
    for length, step in zip(reversed(sizes), reversed(strides)):
        if stride * size == step:
            size *= length
            continue
        if count == 0:
            row = size
        if step < row:
            return -1, row
        count, size, stride = count + 1, length, step
    return count + 1, row
