"""Products in eight bits, as LLM.int8() computes them: https://arxiv.org/abs/2208.07339.

Columns with outliers are computed in 16 bits. Which they are stays on the device: in the place of their numbers stand
those of all columns, of which the others are counted from the end, and multiply with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_EXACT = 1024  # products of int8 that float32 adds up without rounding: 1024 * 128 * 128 = 2^24


def int8_vectorwise_quant(A: Tensor, threshold: float = 0.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return ``round(127 * x / max|x|)`` of each row as int8, these maxima, and the columns with an outlier.

    Outliers, from the threshold on, do not count for the maxima; where there are several rows, their columns are zero.
    """
    columns = None
    if threshold > 0.0:
        outliers = A.abs() >= threshold
        columns = outliers.any(0)
        A = A.masked_fill(outliers, 0)
    largest = A.abs().amax(1).float()
    quantised = torch.round(A * (127.0 / largest.unsqueeze(-1))).to(torch.int8)
    if columns is None:
        return quantised, largest, None
    if len(A) > 1:
        quantised = quantised.masked_fill(columns, 0)
    numbers = torch.arange(A.shape[1], device=A.device)
    return quantised, largest, torch.where(columns, numbers, numbers - A.shape[1])


def int8_linear_matmul(A: Tensor, B: Tensor) -> Tensor:
    """Multiply two int8 matrices into int32, exactly: in pieces that float32 adds up without rounding."""
    total = torch.zeros((*A.shape[:-1], B.shape[0]), dtype=torch.int32, device=A.device)
    for left, right in zip(A.split(_EXACT, -1), B.split(_EXACT, -1)):
        total += F.linear(left.float(), right.float()).to(torch.int32)
    return total


def int8_linear_matmul_out(A: Tensor, B: Tensor, out: Tensor) -> None:
    """Write what :func:`int8_linear_matmul` returns."""
    out.copy_(int8_linear_matmul(A, B))


def int8_scaled_mm(
    A: Tensor,
    B: Tensor,
    row_stats: Tensor,
    col_stats: Tensor,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply two int8 matrices, scaled by row and by column, as one operator where the result is of 16 bits."""
    dtype = dtype or torch.float16
    if dtype is torch.float32 or not A.numel():
        product = torch.ops.bitsandbytes.int8_linear_matmul.default(A, B)
        return torch.ops.bitsandbytes.int8_mm_dequant.default(product, row_stats, col_stats, dtype=dtype, bias=bias)
    rows = A.reshape(-1, A.shape[-1])
    columns, tokens = col_stats.float().view(-1) / 127, row_stats.float().view(-1) / 127
    bias = None if bias is None else bias.float()
    out = torch.ops.npu.npu_quant_matmul(
        rows, B.t(), columns, offset=None, pertoken_scale=tokens, bias=bias, output_dtype=dtype
    )
    return out.view(*A.shape[:-1], B.shape[0])


def int8_mixed_scaled_mm(
    A: Tensor,
    CA: Tensor,
    CB: Tensor,
    SCA: Tensor,
    SCB: Tensor,
    outlier_cols: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Multiply in int8, and add the product of columns with outliers in the dtype of the input."""
    output = torch.ops.bitsandbytes.int8_scaled_mm.default(CA, CB, SCA, SCB, bias=bias, dtype=A.dtype)
    if outlier_cols is None:
        return output, A.new_empty(0)
    apart = A * (outlier_cols >= 0).to(A.dtype)
    weight = torch.ops.bitsandbytes.int8_vectorwise_dequant.default(CB, SCB).to(A.dtype)
    return output + F.linear(apart, weight), apart
