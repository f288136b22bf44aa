"""Casts that torch_npu dispatches to operators of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from softnpu.formulas import formula


@formula
def _npu_dtype_cast(input: Tensor, dtype: torch.dtype) -> Tensor:
    return input.to(dtype)


@formula
def _npu_dtype_cast_backward(grad: Tensor, dtype: torch.dtype) -> Tensor:
    return grad.to(dtype)
