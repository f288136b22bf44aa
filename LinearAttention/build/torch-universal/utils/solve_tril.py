"""The inverse of a unit lower triangular matrix, made of matrix products: CANN's own solve runs on the AI CPU.

aclnnTriangularSolve has an implementation for the AI CPU alone: CANN, ops-math, triangular_solve.cpp. So has writing to
blocks on a diagonal, or to the diagonal itself, whose rows are no regular distance apart: ``IsAiCoreSupport`` of
ops-math, conversion/view_copy/op_api/view_copy.cpp. Blocks are therefore put together by concatenation, and a diagonal
is added as a whole matrix.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_BLOCK = 16  # rows and columns of a tile, of which the device makes its products


def solve_tril(lower: Tensor) -> Tensor:
    """Compute ``(I - L)⁻¹`` for a strictly lower triangular L; fla's function of that name has the other sign of L.

    The blocks of 16 on the diagonal are inverted first: ``(I + L)(I + L²)(I + L⁴)(I + L⁸)`` is exact for them, since
    ``L¹⁶`` is zero. Where keys are equal its terms are binomials of up to 6435 that cancel, and one step of Newton's
    method removes the error of that. Then the inverses ``X₁`` and ``X₂`` of two neighbouring blocks are joined to that
    of the block of both, ``[[X₁, 0], [X₂ L₂₁ X₁, X₂]]``, until one is left. ``Y = X₂ L₂₁ X₁`` is refined once by its
    residual, ``Y + X₂ (L₂₁ X₁ - (I - L₂) Y)``.

    Args:
        lower: L, ``[M, 64, 64]`` in float32.

    Returns:
        ``[M, 64, 64]``.
    """
    size = _BLOCK
    blocks = _diagonal_blocks(lower, size).flatten(0, 1).contiguous()
    inverses = _invert_blocks(blocks).unflatten(0, (len(lower), -1))
    while size < lower.shape[-1]:
        blocks = _diagonal_blocks(lower, 2 * size)
        corner, last = (blocks[..., size:, n : n + size].flatten(0, 1).contiguous() for n in (0, size))
        first, second = (inverses[:, n::2].flatten(0, 1).contiguous() for n in (0, 1))
        product = torch.bmm(corner, first)
        joint = torch.bmm(second, product)
        residual = torch.bmm(last, joint).add_(product).sub_(joint)
        refined = torch.bmm(second, residual).add_(joint)
        rows = nn.functional.pad(first, (0, size)), torch.cat((refined, second), -1)
        inverses = torch.cat(rows, 1).unflatten(0, (len(lower), -1))
        size *= 2
    return inverses.flatten(0, 1)


def _invert_blocks(lower: Tensor) -> Tensor:
    """Compute ``(I - L)⁻¹`` of single blocks, ``[M, 16, 16]``."""
    eye = torch.eye(_BLOCK, dtype=lower.dtype, device=lower.device)
    power, inverse = lower, lower + eye
    for _ in range(_BLOCK.bit_length() - 2):
        power = torch.bmm(power, power)
        inverse = torch.bmm(inverse, power).add_(inverse)
    residual = torch.bmm(lower - eye, inverse).add_(eye)
    return torch.bmm(inverse, residual).add_(inverse)


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """View the blocks on the diagonal of ``[M, C, C]``: ``[M, C / size, size, size]``."""
    blocks = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)
