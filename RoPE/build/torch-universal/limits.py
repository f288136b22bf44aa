"""What ``npu_rotary_mul`` takes (Atlas A2 and A3): CANN's documentation of aclnnRotaryPositionEmbedding.

Shapes are those of four-dimensional tensors: ``shape`` that of what is rotated, ``table`` that of cos and sin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
HEAD_SIZE = 896  # every head is smaller


def fits_half(shape: Sequence[int], table: Sequence[int], itemsize: int) -> bool:
    """Tell whether shapes fit the layouts BNSD and BSND of the mode "half".

    Those that can be read as BNSD have to keep its rules, unless cos has the shape of what is rotated: CANN's
    ops-transformer, rotary_position_embedding/op_host/rope_rotate_half_tiling.cpp, ChooseTilingMode.
    """
    d0, d1, d2, _ = shape
    c0, c1, c2, _ = table
    bnsd = c2 == d2 and ((c1 == 1 and c0 in (1, d0)) or (c1 == d1 and c0 == d0))
    bsnd = c1 == d1 and ((c2 == 1 and c0 in (1, d0)) or (c2 == d2 and c0 == d0))
    if d0 >= 1000 or (bnsd and tuple(shape) != tuple(table) and not _keeps_bnsd(shape, itemsize)):
        return False
    return (bnsd and d1 < 1000) or (bsnd and d2 < 1000)


def _keeps_bnsd(shape: Sequence[int], itemsize: int) -> bool:
    """Tell whether ``B·N <= 8·S`` if half a head fills blocks of 32 bytes, which a decode step breaks."""
    batch, heads, positions, head_size = shape
    if head_size // 2 * itemsize % 32 == 0:
        return batch * heads <= 8 * positions
    return head_size >= 80


def fits_interleave(shape: Sequence[int], table: Sequence[int], itemsize: int) -> bool:
    """Tell whether shapes fit BNSD or BSND of "interleave": one cos for the whole batch, ``B·N < 1000``."""
    d0, d1, d2, _ = shape
    c0, c1, c2, _ = table
    bnsd = c2 == d2 and c0 == c1 == 1 and d0 * d1 < 1000
    bsnd = c1 == d1 and c0 == c2 == 1 and d0 * d2 < 1000
    return bnsd or bsnd


def fits_half_gradient(shape: Sequence[int], table: Sequence[int]) -> bool:
    """Tell whether the gradient of the mode "half" takes shapes that fit: BNSD with a cos a sequence needs ``B < S``.

    CANN's ops-transformer, rotary_position_embedding_grad/op_host/rope_half_grad_tiling.cpp, RopeHalfGradSelectLayout.
    """
    d0, d1, d2, _ = shape
    c0, c1, c2, _ = table
    return not (c0 == d0 >= d2 == c2 > 1 and d1 > c1 == 1)


def fits_tokens(shape: Sequence[int], table: Sequence[int]) -> bool:
    """Tell whether batch and positions together are the positions of one BSND of both modes, each with a row of cos.

    Rows that a batch shares are copied for it, which is 1/N of what is rotated. TND, of three dimensions, means the
    same to the operator, which has it from CANN 8.5 on: rope_rotate_half_tiling.cpp of 8.5.0, line 290.
    """
    return table[0] in (1, shape[0]) and table[1] == shape[1] and table[2] == 1 and shape[2] < 1000
