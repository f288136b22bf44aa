"""What runs when tensors are copied, cast, put together, cut, padded or repeated."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.strided import contiguous, view_copy
from kernels_ext_npu.measuring.inside.table import Call, Kernel, always, cast, nbytes, one_kernel, row


def _copied(source: Tensor, result: Tensor) -> list[Kernel]:
    """Return the kernels of ``aclnnInplaceCopy``: the last of them writes to where the result lies, if it is dense."""
    kernels = [] if source.is_contiguous() else list(contiguous(source))
    kernels += cast(source, result.dtype)
    if source.numel() < result.numel():
        read = source.numel() * result.element_size()
        kernels.append(Kernel("BroadcastTo", read + nbytes(result), workspace=nbytes(result)))
    if not result.is_contiguous():
        kernels.append(view_copy(result))
    elif not kernels:
        kernels.append(Kernel("TensorMove", 2 * nbytes(result)))
    return kernels


@row(
    "copy_",
    "clone",
    "_to_copy",
    source="ops-math conversion/view_copy/op_api/aclnn_copy.cpp:106-156, the same in 8.5.0 to 9.1.0; torch_npu, "
    "CopyKernelOpApi.cpp, CloneKernelOpApi.cpp, ToKernelNpu.cpp",
    reads_in_place=always,
)
def _copy(call: Call) -> Iterable[Kernel]:
    """One TensorMove; else a slice, transpose or broadcast where the source is strided, a Cast where the dtype is
    another one, and a transpose or ViewCopy where the result is strided. Clones and casts of a transposed tensor keep
    its strides: they transpose twice. Copies between host and device are counted as one."""
    source, result = call.tensor("src", "self"), call.result
    if "cpu" in (source.device.type, result.device.type) or not result.numel():
        yield call.main("Memcpy")
        return
    *before, last = _copied(source, result)
    yield from before
    yield call.main(last.name, last.moved, on_ai_cpu=last.on_ai_cpu)


_MANY = 32  # tensors that ConcatD and Pack take


@row("cat", source="ops-math conversion/concat_d/op_api/aclnn_cat.cpp 8.5.0:197-265 9.0.0:323-407 9.1.0:323-424")
def _cat(call: Call) -> Iterable[Kernel]:
    """One ConcatD for 32 tensors, each a copy, and one more for what these made; along the first dimension, from CANN
    9.0 on, for 512 tensors. Those that have not the dtype of the result are cast first. A tensor alone is copied."""
    result = call.result
    given = [tensor for tensor in call.given["tensors"] if tensor.numel()]
    dim = call.given.get("dim", 0) % max(1, result.dim())
    for tensor in given:
        yield from cast(tensor, result.dtype)
    if len(given) < 2:
        yield call.main("TensorMove", 2 * nbytes(result))
        return
    at_once, rows = _MANY, [tensor.shape[-1] * result.element_size() for tensor in given]
    if call.cann >= (9, 0) and dim == 0 and len(given) > _MANY and all(size % 32 == 0 for size in rows):
        at_once = 512
    yield from _joined(call, "ConcatD", [nbytes(tensor, result.dtype) for tensor in given], at_once)


@row("stack", source="ops-math conversion/pack/op_api/aclnn_stack.cpp:157-255, the same in 8.5.0 to 9.1.0")
def _stack(call: Call) -> Iterable[Kernel]:
    """One Pack for 32 tensors, each a copy, and one ConcatD for what these made. Those that have not the dtype of the
    result are cast first."""
    for tensor in call.given["tensors"]:
        yield from cast(tensor, call.result.dtype)
    yield from _joined(call, "Pack", [nbytes(tensor, call.result.dtype) for tensor in call.given["tensors"]], _MANY)


def _joined(call: Call, kernel: str, sizes: list[int], at_once: int) -> Iterable[Kernel]:
    """Give the kernels that put together so many tensors at once, until one is left."""
    while len(sizes) > at_once:
        groups = [sizes[start : start + at_once] for start in range(0, len(sizes), at_once)]
        for group in groups:
            if len(group) > 1:
                yield Kernel(kernel, 2 * sum(group), workspace=sum(group))
        sizes, kernel = [sum(group) for group in groups], "ConcatD"
    yield call.main(kernel, 2 * sum(sizes))


@row(
    "slice_backward",
    "select_backward",
    source="torch, ATen/native/TensorShape.cpp; ops-math math/zero_op, conversion/view_copy/op_api/aclnn_copy.cpp",
)
def _placed(call: Call) -> Iterable[Kernel]:
    """ZerosLike of the whole tensor, and a copy of the gradient to its place in it."""
    gradient, whole = call.tensor("grad_output"), call.result
    if "index" in call.given:
        place = whole.select(call.given["dim"], call.given["index"])
    else:
        start, end = call.given["start"], call.given["end"]
        place = torch.ops.aten.slice.Tensor(whole, call.given["dim"], start, end, call.given["step"])
    yield Kernel("ZerosLike", nbytes(whole))
    if place.is_contiguous():
        yield call.main("TensorMove", 2 * nbytes(gradient))
    else:
        copy = view_copy(place)
        yield call.main(copy.name, copy.moved, on_ai_cpu=copy.on_ai_cpu)


@row("roll", source="ops-math conversion/roll/op_api/aclnn_roll.cpp:164-309, the same in 8.5.0 to 9.1.0")
def _roll(call: Call) -> Iterable[Kernel]:
    """One Roll for each dimension, with a transpose before it and one behind it where the dimension is not the first.
    Booleans are cast to int8 and back."""
    tensor, whole = call.tensor("self"), nbytes(call.result)
    dims = [dim % max(1, tensor.dim()) for dim in call.given["dims"]] or [0]
    if tensor.dtype is torch.bool:
        yield Kernel("Cast", 2 * whole, workspace=whole)
    for number, dim in enumerate(dims):
        if dim:
            yield Kernel("Transpose", 2 * whole, workspace=whole)
        yield call.main("Roll", 2 * whole) if number == 0 else Kernel("Roll", 2 * whole, workspace=whole)
        if dim:
            yield Kernel("Transpose", 2 * whole, workspace=whole)
    if tensor.dtype is torch.bool:
        yield Kernel("Cast", 2 * whole)


@row(
    "constant_pad_nd", source="ops-math conversion/pad_v3/op_api/aclnn_constant_pad_nd.cpp 8.5.0:348-438 9.1.0:393-484"
)
def _pad(call: Call) -> Iterable[Kernel]:
    """One PadV3, of booleans as int8 with casts before and behind it; a negative pad is a StridedSlice for each
    dimension, behind the PadV3 where others are not."""
    source, result, pad = call.tensor("self"), call.result, call.given["pad"]
    shape = list(source.shape)
    for index, amount in enumerate(pad):
        shape[-1 - index // 2] += max(0, amount)
    padded = prod(shape) * source.element_size()
    is_bool = source.dtype is torch.bool
    if not any(pad):
        yield call.main("TensorMove", 2 * nbytes(result))
        return
    if is_bool:
        yield Kernel("Cast", 2 * nbytes(source), workspace=nbytes(source))
    cuts = sum(min(pair) < 0 for pair in zip(pad[::2], pad[1::2]))
    if any(amount > 0 for amount in pad):
        yield call.main("PadV3", nbytes(source) + padded, workspace=padded if cuts or is_bool else 0)
    for number in range(cuts):
        is_main = number == 0 and not any(amount > 0 for amount in pad)
        yield Kernel("StridedSlice", 2 * nbytes(result), is_main=is_main)
    if is_bool:
        yield Kernel("Cast", 2 * nbytes(result))


one_kernel("repeat", kernel="Tile", source="ops-math math/tile/op_api/aclnn_repeat.cpp 8.5.0:191-239 9.x:192-240")
one_kernel("flip", kernel="ReverseV2", source="ops-nn index/reverse_v2/op_api/aclnn_flip.cpp 8.5.0:155 9.x:156-191")


@row("tril", "triu", source="ops-math conversion/triu/op_api/aclnn_triu.cpp 8.5.0:139-173 9.x:140-174, conversion/tril")
def _triangle(call: Call) -> Iterable[Kernel]:
    """One kernel that reads and writes the whole tensor."""
    yield call.main(call.name.rstrip("_").title(), nbytes(call.tensor("self")) + nbytes(call.result))


@row(
    "repeat_interleave",
    source="ops-nn index/repeat_interleave/op_api/aclnn_repeat_interleave.cpp 8.5.0:576-632 9.x:586-644",
)
def _repeat_interleave(call: Call) -> Iterable[Kernel]:
    """One RepeatInterleaveV2; of booleans as int8, with casts before and behind it."""
    source, result = call.tensor("self", "repeats"), call.result
    if source.dtype is torch.bool:
        yield Kernel("Cast", 2 * nbytes(source), workspace=nbytes(source))
    yield call.main("RepeatInterleaveV2")
    if source.dtype is torch.bool:
        yield Kernel("Cast", 2 * nbytes(result))
