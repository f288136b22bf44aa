"""What runs for comparisons, and for what is computed of booleans and bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from kernels_ext_npu.measuring.inside.pointwise import computed, dtype_with_number, operands_on_device
from kernels_ext_npu.measuring.inside.table import Call, Kernel, one_kernel, row


def _comparison(operator: str, kernel: str) -> None:
    """Add the row of a comparison."""

    def kernels(call: Call) -> Iterable[Kernel]:
        operands = operands_on_device(call, "self", "other")
        dtype = operands[0].dtype
        if len(operands) == 2:
            dtype = torch.promote_types(dtype, operands[1].dtype)
        else:
            dtype = dtype_with_number(dtype, call.given["other"])
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
    return computed(call, kernel, operands_on_device(call, "self", "other"), torch.bool)


@row(
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    source="ops-math math/bitwise_and/op_api/aclnn_bitwise_and_tensor.cpp:145-204, the same in 8.5.0 to 9.1.0, …",
)
def _bitwise(call: Call) -> Iterable[Kernel]:
    """One kernel, in the dtype to which both promote; the other one is cast first."""
    operands = operands_on_device(call, "self", "other")
    kernel = {"and": "BitwiseAnd", "or": "BitwiseOr", "xor": "BitwiseXor"}[call.name.rstrip("_").split("_")[1]]
    return computed(call, kernel, operands, torch.promote_types(operands[0].dtype, operands[-1].dtype))


one_kernel(
    "bitwise_not",
    kernel="Invert",
    source="ops-math math/bitwise_not/op_api/aclnn_bitwise_not.cpp; LogicalNot on booleans",
)
