"""Rows that gradients of logits are multiplied with, scaled into the range of float16.

What arrives may be 65,536 for a loss that is scaled for float16, whose largest number is 65,504. Times a hidden state
it would be infinite where the gradient of a weight is not.
"""

from __future__ import annotations

import torch
from torch import Tensor


def power_of_two(x: Tensor) -> Tensor:
    """Return each number without its mantissa, in float32: the power of two that is not larger, of its size."""
    return x.float().view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def scale_into_range(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Cast rows, divided by a power of two where float16 has no numbers as large.

    Returns:
        The rows, and what a product with them is to be multiplied with; None where that is one.
    """
    if dtype is not torch.float16 or not rows.numel():
        return rows.to(dtype), None
    scale = (power_of_two(rows.abs().amax()) / 2**14).clamp(min=1)
    return (rows / scale).half(), scale
