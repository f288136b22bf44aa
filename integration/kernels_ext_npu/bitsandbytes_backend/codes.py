"""Tables of codes on a device, and lookups in them by operators of the AI Core.

Indices are int32, as the device's gathers take them: four bytes for each byte of codes, and none for each value of four
bits. A search among boundaries is binary, since ``torch.bucketize`` runs on the AI CPU.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import functional as F


def code_pairs(quant_type: str, like: Tensor) -> Tensor:
    """Return the two values that each byte stands for, the upper four bits first, float32 ``[256, 2]``."""
    if isinstance(like, FakeTensor):  # which means nothing, and must not be kept
        return like.new_empty(256, 2, dtype=torch.float32)
    return _code_pairs(quant_type, like.device)


def four_bit_boundaries(quant_type: str, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the midpoints of sorted neighbouring codes, float32 ``[15]``, and the codes' own numbers, uint8 ``[256]``.

    The second table maps a byte of two places in that order to the byte that is stored.
    """
    if isinstance(like, FakeTensor):
        return like.new_empty(15, dtype=torch.float32), like.new_empty(256, dtype=torch.uint8)
    return _four_bit_boundaries(quant_type, like.device)


@functools.cache
def _four_bit_codes(quant_type: str) -> Tensor:
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device="cpu")


@functools.cache
def _code_pairs(quant_type: str, device: torch.device) -> Tensor:
    codes = _four_bit_codes(quant_type)
    return torch.stack([codes.repeat_interleave(16), codes.repeat(16)], 1).to(device)


@functools.cache
def _four_bit_boundaries(quant_type: str, device: torch.device) -> tuple[Tensor, Tensor]:
    codes = _four_bit_codes(quant_type)
    order = torch.argsort(codes)
    midpoints = (codes[order[:-1]] + codes[order[1:]]) / 2
    stored = (16 * order.repeat_interleave(16) + order.repeat(16)).to(torch.uint8)
    return midpoints.to(device), stored.to(device)


def lookup(table: Tensor, codes: Tensor) -> Tensor:
    """Return the rows of a table ``[256, W]`` that bytes name, ``[n, W]``."""
    return F.embedding(codes.reshape(-1).to(torch.int32), table)


def count_below(values: Tensor, boundaries: Tensor) -> Tensor:
    """Count for each value the boundaries below it, as uint8: ``torch.bucketize`` of ``2^k - 1`` sorted boundaries."""
    place = torch.zeros_like(values, dtype=torch.int32)
    step = (boundaries.numel() + 1) // 2
    table = boundaries.unsqueeze(1)
    while step:
        is_above = F.embedding(place + (step - 1), table).squeeze(-1) < values
        place += step * is_above.to(torch.int32)
        step //= 2
    return place.to(torch.uint8)


def scale_blocks(values: Tensor, scales: Tensor, blocksize: int) -> Tensor:
    """Multiply each block of a vector by its scale, in place; the last block may be shorter."""
    whole = values.numel() // blocksize
    full = whole * blocksize
    if whole:
        values[:full].view(whole, blocksize).mul_(scales[:whole].view(-1, 1))
    if full < values.numel():
        values[full:].mul_(scales[whole])
    return values


def normalise_blocks(x: Tensor, blocksize: int) -> tuple[Tensor, Tensor]:
    """Divide each block of a tensor by its largest magnitude.

    Returns:
        float32 ``[n]`` within -1 and 1; and the magnitudes, float32, one a block. The last block may be shorter.
    """
    flat = x.reshape(-1).float()
    tiny = torch.finfo(torch.float32).tiny  # of blocks of zeros
    full = flat.numel() - flat.numel() % blocksize
    blocks = flat[:full].view(-1, blocksize)
    largest = blocks.abs().amax(-1) if full else flat.new_empty(0)
    scaled = (blocks * (1.0 / largest.clamp(min=tiny)).view(-1, 1)).clamp_(-1, 1).view(-1)
    if full < flat.numel():
        rest = flat[full:]
        last = rest.abs().amax().clamp(min=tiny)
        largest = torch.cat([largest, last.view(1)])
        scaled = torch.cat([scaled, (rest / last).clamp_(-1, 1)])
    return scaled, largest
