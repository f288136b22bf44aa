"""What runs for operators that compute each element from those at its place."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from kernels_ext_npu.measuring.inside.table import Call, Kernel, cast, nbytes, one_kernel, row

_HALF = (torch.float16, torch.bfloat16)
_NARROW = (*_HALF, torch.float32)


def operands_on_device(call: Call, *names: str) -> list[Tensor]:
    """Return the operands that are on the device: op-plugin hands numbers over as numbers, tensors on the host too."""
    given = (call.given.get(name) for name in names)
    return [value for value in given if isinstance(value, Tensor) and value.device.type != "cpu"]


def computed(
    call: Call, kernel: str, operands: list[Tensor], dtype: torch.dtype, gives: torch.dtype | None = None
) -> Iterable[Kernel]:
    """Give the kernels of an operator that casts its operands to a dtype, computes, and casts to that of its result.

    ``gives`` is the dtype of what the kernel writes, where it is another one: comparisons write booleans.
    """
    gives, result = gives or dtype, call.result
    for operand in operands:
        yield from cast(operand, dtype)
    is_cast = result.dtype is not gives
    read = sum(nbytes(operand, dtype) for operand in operands)
    yield call.main(kernel, read + nbytes(result, gives), workspace=is_cast * nbytes(result, gives))
    if is_cast:
        yield Kernel("Cast", nbytes(result, gives) + nbytes(result))


def _is_mixed(operands: list[Tensor]) -> bool:
    """Tell whether one of two operands is of 16 bits and the other one of float32."""
    dtypes = {operand.dtype for operand in operands}
    return len(dtypes) == 2 and torch.float32 in dtypes and any(dtype in _HALF for dtype in dtypes)


def _computed_mixed(call: Call, kernel: str, operands: list[Tensor]) -> Iterable[Kernel]:
    """Give the kernels where the one that computes reads operands of 16 bits and of float32, and writes float32."""
    result = call.result
    is_cast, written = result.dtype is not torch.float32, nbytes(result, torch.float32)
    yield call.main(kernel, sum(map(nbytes, operands)) + written, workspace=is_cast * written)
    if is_cast:
        yield Kernel("Cast", written + nbytes(result))


@row("mul", source="ops-math math/mul/op_api/aclnn_mul.cpp 8.5.0:368-667 9.0.0:369-669 9.1.0:370-779; op-plugin Mul")
def _mul(call: Call) -> Iterable[Kernel]:
    """One Mul, of 16 bits and float32 too, which gives float32; then a Cast of a float32 workspace where the result is
    of 16 bits. Operands of other dtypes, and mixed ones in place, are cast first. A bfloat16 times a whole number is
    cast to float32 and back, times a fraction it is not."""
    operands = operands_on_device(call, "self", "other")
    if len(operands) == 2:
        if _is_mixed(operands) and not call.name.endswith("_"):
            return _computed_mixed(call, "Mul", operands)
        return computed(call, "Mul", operands, torch.promote_types(operands[0].dtype, operands[1].dtype))
    dtype, number = operands[0].dtype, call.given["other"]
    if dtype is torch.bfloat16 and not _is_fraction(number):
        return computed(call, "Mul", operands, torch.float32)
    return computed(call, "Muls" if dtype is torch.bfloat16 else "Mul", operands, dtype_with_number(dtype, number))


def _is_fraction(number: object) -> bool:
    """Tell whether a number, or a tensor of the host that stands for one, is a fraction."""
    return number.is_floating_point() if isinstance(number, Tensor) else isinstance(number, float)


def dtype_with_number(dtype: torch.dtype, number: object) -> torch.dtype:
    """Return the dtype in which a tensor and a number are computed: that of the tensor, or float32."""
    if dtype.is_floating_point or dtype.is_complex:
        return dtype
    if _is_fraction(number):
        return torch.float32
    return torch.int64 if dtype is torch.bool and not isinstance(number, bool) else dtype


@row("add", source="ops-math math/add/op_api/aclnn_add.cpp 8.5.0:314-624 9.0.0:318-645 9.1.0:318-645; op-plugin Add")
def _add(call: Call) -> Iterable[Kernel]:
    """One Add, of 16 bits and float32 too, and Axpy with an ``alpha``; for bfloat16 and int64 a Mul before the Add.
    Operands of other dtypes are cast first."""
    operands, alpha = operands_on_device(call, "self", "other"), call.given.get("alpha", 1)
    if _is_mixed(operands) and alpha == 1:
        return _computed_mixed(call, "Add", operands)
    return _added(call, "Add", operands, alpha, (torch.float32, torch.int32, torch.float16))


@row(
    "sub",
    "rsub",
    source="ops-math math/sub/op_api/aclnn_sub.cpp 8.5.0:282-504 9.0.0, 9.1.0:297-523, aclnn_rsub.cpp:283-482",
)
def _sub(call: Call) -> Iterable[Kernel]:
    """One Sub, or Axpy with an ``alpha``, which computes in float32. Operands of other dtypes are cast first: 16 bits
    before they meet float32, which an addition does not need."""
    operands, alpha = operands_on_device(call, "self", "other"), call.given.get("alpha", 1)
    return _added(call, "Sub", operands, alpha, (torch.float32,))


def _added(call: Call, kernel: str, operands: list[Tensor], alpha: float, axpy: tuple) -> Iterable[Kernel]:
    """Give the kernels of a sum or difference; ``axpy`` are the dtypes in which one kernel multiplies by ``alpha``."""
    other = call.given["other"]
    if len(operands) == 2:
        dtype = torch.promote_types(operands[0].dtype, operands[1].dtype)
    else:
        dtype = dtype_with_number(operands[0].dtype, other)
    if alpha == 1:
        yield from computed(call, kernel, operands, dtype)
        return
    if kernel == "Sub" and dtype in _HALF:
        dtype = torch.float32
    if dtype in axpy:
        yield from computed(call, "Axpy", operands, dtype)
        return
    if len(operands) == 2:
        multiplied = nbytes(operands[1], dtype)
        yield Kernel("Mul", 2 * multiplied, workspace=multiplied)
    yield from computed(call, kernel, operands, dtype)


@row("div", source="ops-math math/div/op_api/aclnn_div.cpp 8.5.0:368-609 9.0.0:471-691 9.1.0:536-770; op-plugin Div")
def _div(call: Call) -> Iterable[Kernel]:
    """One RealDiv, from CANN 9.0 on of 16 bits and float32 too; 8.5 casts these first. Whole numbers become float32.
    Rounding is one more kernel."""
    operands, mode = operands_on_device(call, "self", "other"), call.given.get("rounding_mode")
    if len(operands) == 2 and _is_mixed(operands) and call.cann >= (9, 0):
        yield from _computed_mixed(call, "RealDiv", operands)
    else:
        dtype = operands[0].dtype if len(operands) == 1 else torch.promote_types(operands[0].dtype, operands[1].dtype)
        if not dtype.is_floating_point and mode is None:
            dtype = torch.float32
        yield from computed(call, "FloorDiv" if mode == "floor" else "RealDiv", operands, dtype)
    if mode == "trunc":
        yield Kernel("Trunc", 2 * nbytes(call.result), workspace=nbytes(call.result))


@row("pow", source="ops-math math/pow/op_api/aclnn_pow.cpp 8.5.0:364-445 9.0.0:388-468 9.1.0:389-474; op-plugin Pow")
def _pow(call: Call) -> Iterable[Kernel]:
    """One Pows where the exponent is 0.5, 2, 3, -0.5, -1 or -2, and one Pow elsewhere, in the dtype of the tensor."""
    operands = operands_on_device(call, "self", "exponent")
    if len(operands) == 2:
        return computed(call, "Pow", operands, torch.promote_types(operands[0].dtype, operands[1].dtype))
    exponent, dtype = call.given["exponent"], operands[0].dtype
    if isinstance(exponent, Tensor):  # of a number
        return computed(call, "Pow", operands, call.result.dtype)
    is_special = exponent in (0.5, 2, 3, -0.5, -1, -2) and dtype in _NARROW
    return computed(call, "Pows" if is_special else "Pow", operands, dtype_with_number(dtype, exponent))


def _function(*operators: str, kernel: str, source: str) -> None:
    """Add a row of operators of one tensor, which cast whole numbers and booleans to float32 first."""

    def kernels(call: Call) -> Iterable[Kernel]:
        self = call.tensor("self")
        return computed(call, kernel, [self], self.dtype if self.dtype.is_floating_point else torch.float32)

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
one_kernel("silu", kernel="Swish", source="ops-nn activation/swish/op_api/aclnn_silu.cpp:61-112")
one_kernel(
    "silu_backward", kernel="SiluGrad", source="ops-nn activation/silu_grad, aclnn_silu_backward.cpp 9.1.0:148-191"
)
one_kernel("gelu", kernel="Gelu", source="ops-nn activation/gelu, gelu_v2, aclnn_gelu.cpp and aclnn_gelu_v2.cpp")
one_kernel("softplus", kernel="SoftplusV2", source="ops-nn activation/softplus_v2, aclnn_softplus.cpp 9.1.0:110-153")


@row(
    "softplus_backward",
    source="ops-nn activation/softplus_v2_grad/op_host/op_api/aclnn_softplus_backward.cpp 8.5.0:141-167 9.x:140-166; "
    "op-plugin op_plugin_functions.yaml",
)
def _softplus_backward(call: Call) -> Iterable[Kernel]:
    """SoftplusV2Grad, in float32 where the gradient and the tensor differ in dtype, which are cast then."""
    operands = [call.tensor("grad_output"), call.tensor("self")]
    dtypes = {operand.dtype for operand in operands}
    return computed(call, "SoftplusV2Grad", operands, dtypes.pop() if len(dtypes) == 1 else torch.float32)


one_kernel("relu", kernel="Relu", source="ops-nn activation/relu/op_api/aclnn_relu.cpp:88-124")
one_kernel("threshold_backward", kernel="ReluGrad", source="ops-nn activation/threshold_grad_v2_d 9.1.0:103-159")
one_kernel("hardtanh_backward", kernel="HardtanhGrad", source="ops-nn activation/hardtanh_grad, …_backward.cpp:95-150")


@row(
    "sigmoid_backward",
    "gelu_backward",
    source="ops-nn activation/sigmoid_grad/op_api/aclnn_sigmoid_backward.cpp:142-212, gelu_grad, gelu_grad_v2",
)
def _backward(call: Call) -> Iterable[Kernel]:
    """One kernel, in the dtype to which the gradient and the tensor promote."""
    operands = operands_on_device(call, "grad_output", "output", "self")
    dtype = torch.promote_types(operands[0].dtype, operands[1].dtype)
    return computed(call, "SigmoidGrad" if call.name == "sigmoid_backward" else "GeluGrad", operands, dtype)


@row(
    "addcmul",
    "addcdiv",
    source="ops-math math/addcmul/op_api/aclnn_addcmul.cpp 8.5.0:236-309 9.0.0, 9.1.0:237-310, addcdiv :169-241",
)
def _fused_multiply(call: Call) -> Iterable[Kernel]:
    """One kernel, in the dtype to which the three tensors promote; the others are cast first."""
    operands = operands_on_device(call, "self", "tensor1", "tensor2")
    dtype = operands[0].dtype
    for operand in operands[1:]:
        dtype = torch.promote_types(dtype, operand.dtype)
    return computed(call, "Addcmul" if call.name.startswith("addcmul") else "Addcdiv", operands, dtype)


one_kernel("lerp", kernel="Lerp", source="ops-math math/lerp/op_api/aclnn_lerp_scalar.cpp 8.5.0:133-169 9.x:136-176")


@row(
    "maximum",
    "minimum",
    source="ops-math math/maximum/op_api/aclnn_maximum.cpp 8.5.0:142-204 9.0.0:142-209 9.1.0:143-188, math/minimum",
)
def _maximum(call: Call) -> Iterable[Kernel]:
    """One kernel, in the dtype to which both tensors promote; the other one is cast first."""
    operands = operands_on_device(call, "self", "other")
    return computed(call, call.name.title(), operands, torch.promote_types(operands[0].dtype, operands[-1].dtype))


@row("clamp", "clamp_min", "clamp_max", source="ops-math conversion/clip_by_value_v2/op_api/aclnn_clamp.cpp:332-580")
def _clamp(call: Call) -> Iterable[Kernel]:
    """One ClipByValueV2, in the dtype of the result; what has another one is cast first."""
    return computed(call, "ClipByValueV2", operands_on_device(call, "self", "min", "max"), call.result.dtype)


@row(
    "where", source="ops-math math/select/op_api/aclnn_s_where.cpp:108-184, the same in 8.5.0 to 9.1.0; op-plugin Where"
)
def _where(call: Call) -> Iterable[Kernel]:
    """One SelectV2, which broadcasts by itself; the tensor that has not the dtype of the result is cast first."""
    condition, dtype = call.tensor("condition"), call.result.dtype
    operands = operands_on_device(call, "self", "other")
    yield from cast(condition, torch.bool)
    for operand in operands:
        yield from cast(operand, dtype)
    chosen = sum(nbytes(operand, dtype) for operand in operands)
    yield call.main("SelectV2", condition.numel() + chosen + nbytes(call.result))


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
