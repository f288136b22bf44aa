"""Define dropout with a mask of bits, in which ``torch.nn.functional.dropout`` ends before op-plugin 26.0.

op-plugin, op_plugin/ops/opapi/DropoutKernelNpuOpApi.cpp. The mask has the size that torch_npu's meta kernel gives it: a
bit for each element, filled up to a multiple of 128. Which elements are dropped follows the device's generator; the
order of the bits in a byte is ours, lowest first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from softnpu.argument_checks import FLOATING, require, require_dtypes
from softnpu.formulas import formula, named_formula
from softnpu.randomness import draw, seeded

_ALIGNED = 128
_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)


@formula
def _npu_dropout(input: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return ``x / (1 - p)`` where an element is kept and zero elsewhere, and the mask that says which are kept."""
    require_dtypes("_npu_dropout", {(dtype,) for dtype in FLOATING}, input=input)
    mask = drawn("_npu_dropout", input.numel(), p, *draw(None))
    return _masked(input, mask, p), mask


@named_formula("_npu_dropout_gen_mask.Tensor")
def _npu_dropout_gen_mask(
    input: Tensor,
    size: list[int],
    p: float,
    seed: int,
    offset: int,
    *,
    parallel: bool | None = True,
    sync: bool | None = None,
) -> Tensor:
    """Return a mask for a tensor of the given size, drawn from a seed and an offset."""
    return drawn("_npu_dropout_gen_mask", math.prod(size), p, seed, offset)


@formula
def npu_dropout_backward(grad_output: Tensor, mask: Tensor, p: float) -> Tensor:
    require_dtypes("npu_dropout_backward", {(d, torch.uint8) for d in FLOATING}, grad_output=grad_output, mask=mask)
    return _masked(grad_output, mask, p)


def drawn(operator: str, count: int, p: float, seed: int, offset: int) -> Tensor:
    """Draw a mask of ``count`` bits, of which each is zero with probability p."""
    require(0 <= p <= 1, operator, f"dropout probability has to be between 0 and 1, but got {p}")
    bits = F.pad(torch.rand(count, generator=seeded(seed, offset)) >= p, (0, -count % _ALIGNED))
    return (bits.view(-1, 8) * _BITS).sum(-1, dtype=torch.uint8)


def kept(mask: Tensor, start: int, shape: torch.Size) -> Tensor:
    """Return the bits of a mask from ``start`` on, as booleans of the shape."""
    return (mask.unsqueeze(-1) & _BITS).ne(0).flatten()[start : start + shape.numel()].view(shape)


def _masked(x: Tensor, mask: Tensor, p: float) -> Tensor:
    return torch.where(kept(mask, 0, x.shape), x.float() / (1 - p) if p < 1 else 0.0, 0.0).to(x.dtype)
