"""Weights in four bits, nf4 and fp4: two values a byte, the first in its upper bits, with a scale for each block."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels_ext_npu.bitsandbytes_backend.codes import (
    code_pairs,
    count_below,
    four_bit_boundaries,
    lookup,
    normalise_blocks,
    scale_blocks,
)


def quantize_4bit(A: Tensor, blocksize: int, quant_type: str, quant_storage: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the codes nearest to each block over its largest magnitude, two a byte, and these magnitudes."""
    scaled, largest = normalise_blocks(A, blocksize)
    boundaries, stored = four_bit_boundaries(quant_type, A)
    if scaled.numel() % 2:
        scaled = F.pad(scaled, (0, 1))
    pairs = count_below(scaled, boundaries).view(-1, 2)
    packed = pairs[:, 0] * 16 + pairs[:, 1]
    if quant_type != "nf4":  # whose codes are sorted
        packed = lookup(stored.unsqueeze(1), packed).view(-1)
    return packed.view(quant_storage).unsqueeze(1), largest


def dequantize_4bit(
    A: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return ``code * scale`` for each value, computed in float32 and rounded once."""
    return scaled_values(A, absmax, blocksize, quant_type, shape).to(dtype)


def scaled_values(A: Tensor, absmax: Tensor, blocksize: int, quant_type: str, shape: Sequence[int]) -> Tensor:
    """Return what :func:`dequantize_4bit` rounds."""
    values = lookup(code_pairs(quant_type, A), A.view(torch.uint8)).view(-1)[: prod(shape)]
    return scale_blocks(values, absmax, blocksize).view(*shape)


def dequantize_4bit_out(
    A: Tensor,
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    shape: Sequence[int],
    dtype: torch.dtype,
    out: Tensor,
) -> None:
    """Write what :func:`dequantize_4bit` returns."""
    out.copy_(scaled_values(A, absmax, blocksize, quant_type, shape))


def gemv_4bit(A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor, code: Tensor, blocksize: int) -> Tensor:
    """Multiply with a weight in four bits; its codes are a tensor of the device, which is not read for their name."""
    pairs = torch.stack([code.float().repeat_interleave(16), code.float().repeat(16)], 1)
    values = lookup(pairs, B.view(torch.uint8)).view(-1)[: prod(shapeB)]
    return _linear(A, scale_blocks(values, absmax, blocksize).to(A.dtype).view(*shapeB), None)


def gemv_4bit_out(
    A: Tensor, B: Tensor, shapeB: Sequence[int], absmax: Tensor, code: Tensor, blocksize: int, out: Tensor
) -> None:
    """Write what :func:`gemv_4bit` returns."""
    out.copy_(gemv_4bit(A, B, shapeB, absmax, code, blocksize))


def gemm_4bit(
    A: Tensor,
    B: Tensor,
    shapeB: Sequence[int],
    absmax: Tensor,
    blocksize: int,
    quant_type: str,
    bias: Tensor | None = None,
    absmax_8bit: Tensor | None = None,
    absmax_code: Tensor | None = None,
    absmax_offset: Tensor | None = None,
) -> Tensor:
    """Multiply with a weight in four bits, whose scales may be in eight bits by blocks of 256, less an offset."""
    if absmax_8bit is not None and absmax_code is not None and absmax_offset is not None:
        absmax = dequantize_blockwise(absmax_8bit, absmax, absmax_code, 256, torch.float32) + absmax_offset
    return _linear(A, dequantize_4bit(B, absmax, blocksize, quant_type, shapeB, A.dtype), bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer below autograd, where nothing takes ``torch.nn.functional.linear`` apart."""
    rows = x.reshape(-1, x.shape[-1])
    y = torch.mm(rows, weight.t()) if bias is None else torch.addmm(bias, rows, weight.t())
    return y.view(*x.shape[:-1], weight.shape[0])


def quantize_blockwise(A: Tensor, code: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """Return the codes nearest to each block over its largest magnitude, a byte each, and these magnitudes."""
    scaled, largest = normalise_blocks(A, blocksize)
    return count_below(scaled, (code[:-1] + code[1:]) / 2).view(A.shape), largest


def dequantize_blockwise(A: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype) -> Tensor:
    """Return ``code * scale`` for each byte, computed in float32 and rounded once."""
    values = lookup(code.view(-1, 1), A).view(-1)
    return scale_blocks(values, absmax, blocksize).to(dtype).view(A.shape)


def dequantize_blockwise_out(
    A: Tensor, absmax: Tensor, code: Tensor, blocksize: int, dtype: torch.dtype, out: Tensor
) -> None:
    """Write what :func:`dequantize_blockwise` returns."""
    out.copy_(dequantize_blockwise(A, absmax, code, blocksize, dtype))
