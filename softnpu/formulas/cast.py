"""Define the casts that torch_npu has operators for: before op-plugin 26.0 all of ``Tensor.to`` ends in one."""

from __future__ import annotations

import torch
from torch import Tensor

from softnpu.argument_checks import require
from softnpu.formulas import formula

# c10/core/ScalarType.h: newer schemas take the dtype as a number
_NUMBERS = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
}  # fmt: skip


@formula
def npu_dtype_cast(input: Tensor, dtype: int, input_dtype: int | None = None) -> Tensor:
    """Cast ``input`` to another dtype. Those that torch does not have are refused."""
    return input.to(as_torch_dtype("npu_dtype_cast", dtype, input_dtype), copy=True)


@formula
def npu_dtype_cast_backward(
    grad: Tensor, dtype: torch.dtype, grad_dtype: int | None = None, input_dtype: int | None = None
) -> Tensor:
    return grad.to(as_torch_dtype("npu_dtype_cast_backward", dtype, grad_dtype, input_dtype), copy=True)


@formula
def _npu_dtype_cast(input: Tensor, dtype: torch.dtype) -> Tensor:
    return input.to(dtype, copy=True)


@formula
def _npu_dtype_cast_backward(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.to(dtype, copy=True)


def as_torch_dtype(operator: str, dtype: int | torch.dtype, *others: int | None) -> torch.dtype:
    """Return a dtype that torch has, given as itself or as its number; beside it only numbers of the same kind."""
    unknown = [n for n in (dtype, *others) if isinstance(n, int) and n not in _NUMBERS]
    require(not unknown, operator, f"the software device has no dtype number {unknown}")
    return _NUMBERS[dtype] if isinstance(dtype, int) else dtype
