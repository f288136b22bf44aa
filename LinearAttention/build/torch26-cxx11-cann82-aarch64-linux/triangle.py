"""The inverse of a unit triangle from matrix products: a solve would be left to the few scalar cores of the device.

aclnnTriangularSolve has an implementation for the AI CPU alone: CANN, ops-math, triangular_solve.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BLOCK = 8


def inverse(lower: Tensor) -> Tensor:
    """Compute ``(I + L)⁻¹`` for L, the triangle strictly below the diagonal of ``lower``.

    The series ``(I - L)(I + L²)(I + L⁴)...`` ends, since L is nilpotent, but its terms over a whole chunk cancel: with
    equal keys they are binomials of up to 1e18. It is taken twice over blocks of 8, where they are 35 at most: for the
    blocks on the diagonal, and for what these leave, which is nilpotent block by block. One step of Newton's method
    then takes out what even these have cost.

    Args:
        lower: ``[M, 64, 64]`` in float32; what is not strictly below the diagonal is not looked at.

    Returns:
        ``[M, 64, 64]``.
    """
    size = lower.shape[-1]
    eye = torch.eye(size, dtype=lower.dtype, device=lower.device)
    below = torch.full((size, size), -1.0, dtype=lower.dtype, device=lower.device).tril(-1)
    blocks = eye[:_BLOCK, :_BLOCK, None].expand(-1, -1, _BLOCK * _BLOCK).unflatten(-1, (_BLOCK, _BLOCK))
    negative = lower * below
    inside = negative * blocks.permute(0, 2, 1, 3).reshape(size, size)  # -L on the diagonal blocks
    square = torch.bmm(inside, inside)
    diagonal = inside + eye
    diagonal = torch.baddbmm(diagonal, diagonal, square)
    diagonal = torch.baddbmm(diagonal, diagonal, torch.bmm(square, square))
    rest = torch.bmm(diagonal, negative - inside)
    square = torch.bmm(rest, rest)
    found = torch.baddbmm(diagonal, torch.bmm(square, square), diagonal)
    found = torch.baddbmm(found, square, found)
    found = torch.baddbmm(found, rest, found)
    return torch.baddbmm(found, found, torch.baddbmm(eye - found, negative, found))
