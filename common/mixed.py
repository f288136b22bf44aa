"""Products of large matrices of bfloat16 with small ones of float32, without a cast of the large ones.

A number of float32 is the sum of three of bfloat16, eight bits of its mantissa each. The device multiplies bfloat16
exactly and adds up in float32, so that a product with all three, side by side in one matrix, is that of float32; the
large matrix is read once, in 16 bits. What is added to a matrix of bfloat16 needs two: what they leave out is less than
a hundredth of the rounding of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of the large matrix. A cast of so many, and reading what it gives, moves 34 MB, which is 20 microseconds; to
# make pieces of the small one takes three launches more.
LARGE = 2**22


def takes(x: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether a matrix is multiplied with matrices of a dtype, or such products are added to it, without a cast.

    It takes the release of torch_npu that has ``mm`` with a dtype for its result (op-plugin 26.1,
    MmKernelNpuOpApi.cpp); CANN's ``aclnnAddmm`` of its time adds a float32 product of bfloat16 (ops-nn,
    matmul/mat_mul_v3/op_host/op_api/aclnn_addmm.cpp), so that the sum is rounded once.
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
        parts = torch.mm(torch.cat(pieces_of(left)), right, out_dtype=torch.float32).unflatten(0, (3, -1))
        return torch.sum(parts, 0, out=out)
    parts = torch.mm(left, torch.cat(pieces_of(right), 1), out_dtype=torch.float32).unflatten(1, (3, -1))
    return torch.sum(parts, 1, out=out)


def add_mixed(total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
    """Add ``scale * left @ right`` of two small matrices of float32 to one of bfloat16, in place, rounded once."""
    (high, low), (other_high, other_low) = pieces_of(left, 2), pieces_of(right, 2)
    total.addmm_(torch.cat((high, high, low), 1), torch.cat((other_high, other_low, other_high)), alpha=scale)


def pieces_of(matrix: Tensor, number: int = 3) -> list[Tensor]:
    """Cut a matrix of float32 into some of bfloat16: three add up to it, unless a number is not finite.

    The upper half of a number's bits is a number of bfloat16, and what it leaves out of it is one of float32 again:
    1.0101 is 1.0078125 + 0.0022735595703125 + 0.000013947486877, say.
    """
    is_transposed = matrix.stride(1) != 1
    rest = matrix.t().contiguous() if is_transposed else matrix
    pieces: list[Tensor] = []
    for _ in range(number):
        rest = rest - pieces[-1] if pieces else rest
        pieces.append(rest.view(torch.bfloat16)[:, 1::2])
    return [piece.t() for piece in pieces] if is_transposed else pieces
