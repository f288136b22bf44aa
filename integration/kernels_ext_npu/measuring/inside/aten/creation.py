"""What runs for tensors that are filled, counted up, or made of others' numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels_ext_npu.measuring.inside.strided import view_copy
from kernels_ext_npu.measuring.inside.table import Call, Kernel, always, cast, nbytes, one_kernel, row, written


@row(
    "fill_",
    "zero_",
    source="ops-math conversion/fill/op_api/aclnn_fill_scalar.cpp 8.5.0:118-161 9.0.0:118-169 9.1.0:119-170, "
    "aclnn_fill_tensor.cpp, math/zero_op/op_api/aclnn_zero.cpp 8.5.0:77-112 9.x:78-113",
    reads_in_place=always,
)
def _fill(call: Call) -> Iterable[Kernel]:
    """One Fill or ZerosLike, into the workspace with a ViewCopy behind it where the tensor is strided; ``zero_`` lays a
    strided tensor out before, which it does not read."""
    tensor, whole = call.tensor("self"), nbytes(call.result)
    is_strided = not tensor.is_contiguous()
    if is_strided and call.name == "zero_":
        yield Kernel("Contiguous", 2 * whole, workspace=whole)
    yield call.main("Fill" if call.name == "fill_" else "ZerosLike", whole, workspace=whole * is_strided)
    if is_strided:
        yield view_copy(tensor)


one_kernel(
    "zeros", "ones", "full", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "full_like",
    "scalar_tensor",
    kernel="Fill", reads_in_place=always,
    source="op-plugin Zeros, Ones, ZerosLike, OnesLike; torch, ATen/native/TensorFactories.cpp; ops-math "
    "conversion/fill, math/zero_op, math/ones_like",
)  # fmt: skip


@row(
    "arange", source="ops-math math/range/op_api/aclnn_arange.cpp:178-208, the same in 8.5.0 to 9.1.0; op-plugin Arange"
)
def _arange(call: Call) -> Iterable[Kernel]:
    """One Range, in the dtype of the result."""
    yield call.main("Range", nbytes(call.result))


one_kernel("one_hot", kernel="OneHot", source="ops-math math/one_hot/op_api/aclnn_one_hot.cpp 8.5.0:182 9.x:183-232")


@row(
    "histc",
    source="ops-math math/histogram_v2/op_host/op_api/aclnn_histc.cpp 8.5.0:185-303 9.x:185-313; op-plugin Histc",
)
def _histc(call: Call) -> Iterable[Kernel]:
    """One Histogram of int32, and a cast of it; without limits ReduceMin and ReduceMax of the whole before."""
    size = nbytes(call.tensor("self"))
    if call.given.get("min", 0) == call.given.get("max", 0):
        yield Kernel("ReduceMin", size)
        yield Kernel("ReduceMax", size)
    yield from written(call, "Histogram", size, torch.int32)


@row(
    "bincount",
    source="ops-math math/bincount/op_api/aclnn_bincount.cpp 8.5.0:116-244 9.x:116-249, bincount.cpp",
)
def _bincount(call: Call) -> Iterable[Kernel]:
    """ReduceMin and ReduceMax for the host, a cast to int32, Fill of the weights, and Bincount on the AI CPU."""
    tensor, result = call.tensor("self"), call.result
    yield Kernel("ReduceMin", nbytes(tensor))
    yield Kernel("ReduceMax", nbytes(tensor))
    yield from cast(tensor, torch.int32)
    if call.given.get("weights") is None:
        yield Kernel("Fill", 4 * tensor.numel(), workspace=4 * tensor.numel())
    yield call.main("Bincount", 8 * tensor.numel() + nbytes(result), on_ai_cpu=True)
