"""Small tensors on the device, which calls of operators are given."""

import torch
from torch import Tensor

FULL, HALF, FP16, INT, LONG = torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64


def npu(*shape: int, dtype: torch.dtype = FULL) -> Tensor:
    return torch.ones(shape, dtype=dtype, device="npu")


def half(*shape: int) -> Tensor:
    return npu(*shape, dtype=HALF)


def fp16(*shape: int) -> Tensor:
    return npu(*shape, dtype=FP16)


def int8(*shape: int) -> Tensor:
    return npu(*shape, dtype=torch.int8)


def int32(*shape: int) -> Tensor:
    return npu(*shape, dtype=INT)


def index(*numbers, dtype: torch.dtype = LONG) -> Tensor:
    return torch.tensor(numbers, dtype=dtype, device="npu")
