"""The inverse of a unit triangle from matrix products: a solve would be left to the few scalar cores of the device.

aclnnTriangularSolve has an implementation for the AI CPU alone: CANN, ops-math, triangular_solve.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .chunks import diagonal_blocks

_BLOCK = 16  # rows and columns of a tile, of which the device makes its products


def inverse(lower: Tensor) -> Tensor:
    """Compute ``(I - L)⁻¹`` for L, a triangle strictly below the diagonal.

    The series ``(I + L)(I + L²)(I + L⁴)(I + L⁸)`` ends for blocks of 16 on the diagonal, since these are nilpotent; but
    where keys are equal its terms are binomials of up to 6435 that cancel, and one step of Newton's method takes out
    what that costs. Two blocks are joined then, and two of these: ``X₂ L₂₁ X₁`` stands between the inverses of both,
    refined once by what ``(I - L₂)`` times it leaves of ``L₂₁ X₁``.

    Args:
        lower: L, ``[M, 64, 64]`` in float32.

    Returns:
        ``[M, 64, 64]``.
    """
    found, size = lower[:, 0, 0].new_zeros(lower.shape), _BLOCK
    inverted = _of_blocks(diagonal_blocks(lower, size).flatten(0, 1).contiguous())
    diagonal_blocks(found, size).copy_(inverted.view(len(lower), -1, size, size))
    while size < lower.shape[-1]:
        blocks, joined = diagonal_blocks(lower, 2 * size), diagonal_blocks(found, 2 * size)
        corner, last = (blocks[..., size:, n : n + size].flatten(0, 1).contiguous() for n in (0, size))
        first, second = (joined[..., n : n + size, n : n + size].flatten(0, 1).contiguous() for n in (0, size))
        last.diagonal(dim1=-2, dim2=-1).fill_(-1)
        wanted = torch.bmm(corner, first)
        between = torch.bmm(second, wanted)
        rest = torch.bmm(last, between).add_(wanted)
        refined = torch.bmm(second, rest).add_(between)
        joined[..., size:, :size].copy_(refined.unflatten(0, joined.shape[:2]))
        size *= 2
    return found


def _of_blocks(lower: Tensor) -> Tensor:
    """Compute ``(I - lower)⁻¹`` of single blocks, ``[M, 16, 16]``."""
    eye = torch.eye(_BLOCK, dtype=lower.dtype, device=lower.device)
    power, found = lower, lower + eye
    for _ in range(_BLOCK.bit_length() - 2):
        power = torch.bmm(power, power)
        found = torch.bmm(found, power).add_(found)
    rest = torch.bmm(lower - eye, found).add_(eye)
    return torch.bmm(found, rest).add_(found)
