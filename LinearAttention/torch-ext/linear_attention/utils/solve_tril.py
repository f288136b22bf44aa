"""The inverse of a unit triangle from matrix products: a solve would be left to the few scalar cores of the device.

aclnnTriangularSolve has an implementation for the AI CPU alone: CANN, ops-math, triangular_solve.cpp. So has writing to
blocks on a diagonal, or to the diagonal itself, whose rows are no regular distance apart: ``IsAiCoreSupport`` of
ops-math, conversion/view_copy/op_api/view_copy.cpp. What stands there is joined, or added in whole matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .chunk_layout import diagonal_blocks

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
    size = _BLOCK
    found = _of_blocks(diagonal_blocks(lower, size).flatten(0, 1).contiguous()).unflatten(0, (len(lower), -1))
    while size < lower.shape[-1]:
        blocks = diagonal_blocks(lower, 2 * size)
        corner, last = (blocks[..., size:, n : n + size].flatten(0, 1).contiguous() for n in (0, size))
        first, second = (found[:, n::2].flatten(0, 1).contiguous() for n in (0, 1))
        wanted = torch.bmm(corner, first)
        between = torch.bmm(second, wanted)
        rest = torch.bmm(last, between).add_(wanted).sub_(between)
        refined = torch.bmm(second, rest).add_(between)
        rows = nn.functional.pad(first, (0, size)), torch.cat((refined, second), -1)
        found = torch.cat(rows, 1).unflatten(0, (len(lower), -1))
        size *= 2
    return found.flatten(0, 1)


def _of_blocks(lower: Tensor) -> Tensor:
    """Compute ``(I - lower)⁻¹`` of single blocks, ``[M, 16, 16]``."""
    eye = torch.eye(_BLOCK, dtype=lower.dtype, device=lower.device)
    power, found = lower, lower + eye
    for _ in range(_BLOCK.bit_length() - 2):
        power = torch.bmm(power, power)
        found = torch.bmm(found, power).add_(found)
    rest = torch.bmm(lower - eye, found).add_(eye)
    return torch.bmm(found, rest).add_(found)
