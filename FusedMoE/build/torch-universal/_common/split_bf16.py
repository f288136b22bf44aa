"""Products of large matrices of bfloat16 with small ones of float32, without a cast of the large ones.

A number of float32 is the sum of three of bfloat16, eight bits of its mantissa each. The device multiplies bfloat16
exactly and adds up in float32, so that a product with all three, side by side in one matrix, is that of float32; the
large matrix is read once, in 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of the large matrix. A cast of so many, and reading what it gives, moves 67 MB more than the product does, at
# 1.6 TB/s 42 microseconds; pieces of the small one, and the sum of their products, are eight short kernels instead.
LARGE = 2**23


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a matrix is multiplied with matrices of a dtype without a cast.

    It takes the release of torch_npu that has ``mm`` with a dtype for its result (op-plugin 26.1,
    MmKernelNpuOpApi.cpp).
    """
    is_mixed = x.dtype is torch.bfloat16 and dtype is torch.float32
    return is_mixed and x.numel() >= LARGE and x.device.type == "npu" and has_wide_result()


def has_wide_result() -> bool:
    """Tell whether torch_npu has a kernel for ``mm.dtype``. A compiler cannot look, and casts."""
    if torch.compiler.is_compiling() or not hasattr(torch.ops.aten.mm, "dtype"):
        return False
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::mm.dtype", "PrivateUse1")


def mixed_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """Compute ``left @ right`` of two matrices, one of float32 and one of bfloat16, in float32."""
    if left.dtype is torch.float32:
        parts = torch.mm(split_into_bf16(left).flatten(0, 1), right, out_dtype=torch.float32).unflatten(0, (3, -1))
        return torch.sum(parts, 0, out=out)
    parts = torch.mm(left, split_into_bf16(right.t()).flatten(0, 1).t(), out_dtype=torch.float32).unflatten(1, (3, -1))
    return torch.sum(parts, 1, out=out)


def split_into_bf16(matrix: Tensor) -> Tensor:
    """Cut a matrix of float32 ``[M, K]`` into three of bfloat16 ``[3, M, K]``, which add up to it if it is finite.

    Each is what the ones before leave, rounded: 1.0101 is 1.0078125 + 0.002288818359375 - 0.000001311302185, say.
    """
    rest = matrix.contiguous()
    pieces = torch.empty(3, *rest.shape, dtype=torch.bfloat16, device=rest.device)
    for piece in pieces[:2]:
        piece.copy_(rest)
        rest = rest - piece
    pieces[2].copy_(rest)
    return pieces
