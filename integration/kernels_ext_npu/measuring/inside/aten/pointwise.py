"""What runs for operators that compute each element from those at its place: arithmetic, functions, comparisons."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import (
    HALF,
    Call,
    Kernel,
    cast,
    computed,
    nbytes,
    one_kernel,
    promoted,
    row,
    written,
)


def _is_mixed(operands: list[Tensor]) -> bool:
    """Tell whether one of two operands is of 16 bits and the other one of float32."""
    dtypes = {operand.dtype for operand in operands}
    return len(dtypes) == 2 and torch.float32 in dtypes and any(dtype in HALF for dtype in dtypes)


@row("mul", source="ops-math math/mul/op_api/aclnn_mul.cpp 8.5.0:368-667 9.0.0:369-669 9.1.0:370-779; op-plugin Mul")
def _mul(call: Call) -> Iterable[Kernel]:
    """One Mul, of 16 bits and float32 too, which gives float32; then a Cast of a float32 workspace where the result is
    of 16 bits. Operands of other dtypes, and mixed ones in place, are cast first. A bfloat16 times a whole number is
    cast to float32 and back, times a fraction it is not."""
    operands, number = call.operands("self", "other"), call.given["other"]
    if _is_mixed(operands) and not call.name.endswith("_"):
        return written(call, "Mul", sum(map(nbytes, operands)), torch.float32)
    dtype = _common_dtype(operands, number)
    if len(operands) == 2 or dtype is not torch.bfloat16:
        return computed(call, "Mul", operands, dtype)
    if _is_fraction(number):
        return computed(call, "Muls", operands, dtype)
    return computed(call, "Mul", operands, torch.float32)


def _is_fraction(number: object) -> bool:
    """Tell whether a number, or a tensor of the host that stands for one, is a fraction."""
    return number.is_floating_point() if isinstance(number, Tensor) else isinstance(number, float)


def _common_dtype(operands: list[Tensor], number: object) -> torch.dtype:
    """Return the dtype in which two tensors are computed, or one and a number: that of the tensor, or float32."""
    dtype = promoted(operands)
    if len(operands) == 2 or dtype.is_floating_point or dtype.is_complex:
        return dtype
    if _is_fraction(number):
        return torch.float32
    return torch.int64 if dtype is torch.bool and not isinstance(number, bool) else dtype


@row("add", source="ops-math math/add/op_api/aclnn_add.cpp 8.5.0:314-624 9.0.0:318-645 9.1.0:318-645; op-plugin Add")
def _add(call: Call) -> Iterable[Kernel]:
    """One Add, of 16 bits and float32 too, and Axpy with an ``alpha``; for bfloat16 and int64 a Mul before the Add.
    Operands of other dtypes are cast first."""
    operands = call.operands("self", "other")
    if _is_mixed(operands) and call.given.get("alpha", 1) == 1:
        return written(call, "Add", sum(map(nbytes, operands)), torch.float32)
    return _added(call, "Add", (torch.float32, torch.int32, torch.float16))


@row(
    "sub",
    "rsub",
    source="ops-math math/sub/op_api/aclnn_sub.cpp 8.5.0:282-504 9.0.0, 9.1.0:297-523, aclnn_rsub.cpp:283-482",
)
def _sub(call: Call) -> Iterable[Kernel]:
    """One Sub, or Axpy with an ``alpha``, which computes in float32. Operands of other dtypes are cast first: 16 bits
    before they meet float32, which an addition does not need."""
    return _added(call, "Sub", (torch.float32,))


def _added(call: Call, kernel: str, axpy: tuple[torch.dtype, ...]) -> Iterable[Kernel]:
    """Give the kernels of a sum or difference; ``axpy`` are the dtypes in which one kernel multiplies by ``alpha``."""
    operands = call.operands("self", "other")
    dtype = _common_dtype(operands, call.given["other"])
    if call.given.get("alpha", 1) != 1:
        if kernel == "Sub" and dtype in HALF:
            dtype = torch.float32
        if dtype in axpy:
            kernel = "Axpy"
        elif len(operands) == 2:
            multiplied = nbytes(operands[1], dtype)
            yield Kernel("Mul", 2 * multiplied, workspace=multiplied)
    yield from computed(call, kernel, operands, dtype)


@row("div", source="ops-math math/div/op_api/aclnn_div.cpp 8.5.0:368-609 9.0.0:471-691 9.1.0:536-770; op-plugin Div")
def _div(call: Call) -> Iterable[Kernel]:
    """One RealDiv, from CANN 9.0 on of 16 bits and float32 too; 8.5 casts these first. Whole numbers become float32.
    Rounding is one more kernel."""
    operands, mode = call.operands("self", "other"), call.given.get("rounding_mode")
    if _is_mixed(operands) and call.cann >= (9, 0):
        yield from written(call, "RealDiv", sum(map(nbytes, operands)), torch.float32)
    else:
        dtype = promoted(operands)
        if not dtype.is_floating_point and mode is None:
            dtype = torch.float32
        yield from computed(call, "FloorDiv" if mode == "floor" else "RealDiv", operands, dtype)
    if mode == "trunc":
        yield Kernel("Trunc", 2 * nbytes(call.result), workspace=nbytes(call.result))


@row("pow", source="ops-math math/pow/op_api/aclnn_pow.cpp 8.5.0:364-445 9.0.0:388-468 9.1.0:389-474; op-plugin Pow")
def _pow(call: Call) -> Iterable[Kernel]:
    """One Pows where the exponent is 0.5, 2, 3, -0.5, -1 or -2, and one Pow elsewhere, in the dtype of the tensor."""
    operands, exponent = call.operands("self", "exponent"), call.given["exponent"]
    if isinstance(exponent, Tensor):
        dtype = promoted(operands) if len(operands) == 2 else call.result.dtype
        return computed(call, "Pow", operands, dtype)
    is_special = exponent in (0.5, 2, 3, -0.5, -1, -2) and operands[0].dtype in (*HALF, torch.float32)
    return computed(call, "Pows" if is_special else "Pow", operands, _common_dtype(operands, exponent))


def _function(*operators: str, kernel: str, source: str) -> None:
    """Add a row of operators of one tensor, which cast whole numbers and booleans to float32 first."""

    def kernels(call: Call) -> Iterable[Kernel]:
        tensor = call.tensor("self")
        return computed(call, kernel, [tensor], tensor.dtype if tensor.is_floating_point() else torch.float32)

    kernels.__doc__ = f"{kernel}; whole numbers are cast to float32 first."
    row(*operators, source=source)(kernels)


_function(
    "rsqrt", kernel="Rsqrt", source="ops-math math/rsqrt/op_api/aclnn_rsqrt.cpp:95-142, the same in 8.5.0 to 9.1.0"
)
_function("sqrt", kernel="Sqrt", source="ops-math math/sqrt/op_api/aclnn_sqrt.cpp 8.5.0:99-148 9.0.0, 9.1.0:106-159")
_function("exp", kernel="Exp", source="ops-math math/exp/op_api/aclnn_exp.cpp 8.5.0:104-147 9.0.0, 9.1.0:102-149")
_function("log", kernel="Log", source="ops-math math/log/op_api/aclnn_log.cpp:102-143, the same in 8.5.0 to 9.1.0")
_function("tanh", kernel="Tanh", source="ops-math math/tanh/op_api/aclnn_tanh.cpp 8.5.0:142-183 9.0.0, 9.1.0:147-188")
_function("sin", kernel="Sin", source="ops-math math/sin/op_api/aclnn_sin.cpp 8.5.0:95-142 9.0.0, 9.1.0:98-145")
_function(
    "cos", kernel="Cos", source="ops-math math/cos/op_api/aclnn_cos.cpp 8.5.0:101-144 9.0.0:104-147 9.1.0:103-146"
)
_function("reciprocal", kernel="Reciprocal", source="ops-math math/reciprocal/op_api/aclnn_reciprocal.cpp:161-206")
_function("sigmoid", kernel="Sigmoid", source="ops-nn activation/sigmoid/op_api/aclnn_sigmoid.cpp:122-168")
one_kernel("neg", kernel="Neg", source="ops-math math/neg/op_api/aclnn_neg.cpp 8.5.0:99-131 9.0.0, 9.1.0:100-136")
one_kernel("abs", kernel="Abs", source="ops-math math/abs/op_api/aclnn_abs.cpp 8.5.0:169-218 9.0.0, 9.1.0:170-219")


@row(
    "addcmul",
    "addcdiv",
    source="ops-math math/addcmul/op_api/aclnn_addcmul.cpp 8.5.0:236-309 9.0.0, 9.1.0:237-310, addcdiv :169-241",
)
def _fused_multiply(call: Call) -> Iterable[Kernel]:
    """One kernel, in the dtype to which the three tensors promote; the others are cast first."""
    operands = call.operands("self", "tensor1", "tensor2")
    kernel = "Addcmul" if call.name.startswith("addcmul") else "Addcdiv"
    return computed(call, kernel, operands, promoted(operands))


one_kernel("lerp", kernel="Lerp", source="ops-math math/lerp/op_api/aclnn_lerp_scalar.cpp 8.5.0:133-169 9.x:136-176")


@row(
    "maximum",
    "minimum",
    source="ops-math math/maximum/op_api/aclnn_maximum.cpp 8.5.0:142-204 9.0.0:142-209 9.1.0:143-188, math/minimum",
)
def _maximum(call: Call) -> Iterable[Kernel]:
    """One kernel, in the dtype to which both tensors promote; the other one is cast first."""
    operands = call.operands("self", "other")
    return computed(call, call.name.title(), operands, promoted(operands))


@row("clamp", "clamp_min", "clamp_max", source="ops-math conversion/clip_by_value_v2/op_api/aclnn_clamp.cpp:332-580")
def _clamp(call: Call) -> Iterable[Kernel]:
    """One ClipByValueV2, in the dtype of the result; what has another one is cast first."""
    return computed(call, "ClipByValueV2", call.operands("self", "min", "max"), call.result.dtype)


@row(
    "where", source="ops-math math/select/op_api/aclnn_s_where.cpp:108-184, the same in 8.5.0 to 9.1.0; op-plugin Where"
)
def _where(call: Call) -> Iterable[Kernel]:
    """One SelectV2, which broadcasts by itself; the tensor that has not the dtype of the result is cast first."""
    condition, dtype = call.tensor("condition"), call.result.dtype
    operands = call.operands("self", "other")
    yield from cast(condition, torch.bool)
    for operand in operands:
        yield from cast(operand, dtype)
    yield from written(call, "SelectV2", condition.numel() + sum(nbytes(operand, dtype) for operand in operands), dtype)


@row(
    "masked_fill",
    source="ops-math conversion/masked_fill/op_api/aclnn_masked_fill_scalar.cpp:122-169, the same in 8.5.0 to 9.1.0; "
    "torch, ATen/native/TensorAdvancedIndexing.cpp",
)
def _masked_fill(call: Call) -> Iterable[Kernel]:
    """One MaskedFill, which reads and writes the whole tensor; out of place a copy of it before, which torch makes."""
    result = nbytes(call.result)
    if not call.name.endswith("_"):
        yield Kernel("TensorMove", nbytes(call.tensor("self")) + result)
    yield call.main("MaskedFill", 2 * result + nbytes(call.tensor("mask")))


def _comparison(operator: str, kernel: str) -> None:
    """Add the row of a comparison."""

    def kernels(call: Call) -> Iterable[Kernel]:
        operands = call.operands("self", "other")
        dtype = _common_dtype(operands, call.given["other"])
        if dtype is torch.bool and kernel not in ("Equal", "NotEqual"):
            dtype = torch.float32
        return computed(call, kernel, operands, dtype, gives=torch.bool)

    kernels.__doc__ = f"{kernel}, in the dtype to which the operands promote; those of another one are cast first."
    row(
        operator,
        source=f"ops-math math/{operator}*/op_api, aclnn_{operator}_tensor.cpp and aclnn_{operator}_scalar.cpp",
    )(kernels)


for _operator, _kernel in {
    "eq": "Equal", "ne": "NotEqual", "lt": "Less", "gt": "Greater", "le": "LessEqual", "ge": "GreaterEqual"
}.items():  # fmt: skip
    _comparison(_operator, _kernel)


@row(
    "logical_and",
    "logical_or",
    "logical_not",
    source="ops-math math/logical_and/op_api/aclnn_logical_and.cpp 8.5.0:109-156 9.x:117-166, logical_or, logical_not",
)
def _logical(call: Call) -> Iterable[Kernel]:
    """One kernel, on booleans; all else is cast to booleans first."""
    kernel = {"and": "LogicalAnd", "or": "LogicalOr", "not": "LogicalNot"}[call.name.split("_")[1]]
    return computed(call, kernel, call.operands("self", "other"), torch.bool)


@row(
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    source="ops-math math/bitwise_and/op_api/aclnn_bitwise_and_tensor.cpp:145-204, the same in 8.5.0 to 9.1.0, …",
)
def _bitwise(call: Call) -> Iterable[Kernel]:
    """One kernel, in the dtype to which both promote; the other one is cast first."""
    operands = call.operands("self", "other")
    kernel = {"and": "BitwiseAnd", "or": "BitwiseOr", "xor": "BitwiseXor"}[call.name.rstrip("_").split("_")[1]]
    return computed(call, kernel, operands, promoted(operands))


one_kernel(
    "bitwise_not",
    kernel="Invert",
    source="ops-math math/bitwise_not/op_api/aclnn_bitwise_not.cpp; LogicalNot on booleans",
)
