"""Sums of gates within chunks, and the decays that follow from them. What has no decay is left out before ``exp``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunks import CHUNK, filled_up, number
from .sequences import Bounds


class Decays(NamedTuple):
    """Holds the decays between a token and the bounds of its chunk; G is 1, or the size of a head.

    Attributes:
        lead: from the start of the chunk to the token, ``[M, C, G]``.
        trail: from the token to the end of the chunk, ``[M, C, G]``.
        whole: of the chunk, ``[M, G]``.
    """

    lead: Tensor
    trail: Tensor
    whole: Tensor


def summed(g: Tensor, bounds: Bounds | None) -> Tensor:
    """Sum gates ``[B, T, H, G]`` from the start of a chunk, or of a sequence in it, in float32: ``[N * B * H, C, G]``.

    In packed rows the sums start again with a sequence: differences of sums over others would lose digits.
    """
    heads = g.shape[2]
    g = filled_up(g).unflatten(1, (-1, 2, CHUNK)).permute(2, 1, 0, 3, 4, 5).float()
    if bounds is None:
        sums = g.cumsum(3)
    else:
        sums = torch.bmm(bounds.same.flatten(0, 1).float(), g.flatten(4).flatten(0, 2))
        sums = sums.unflatten(-1, (heads, -1)).unflatten(0, g.shape[:3])
    return sums.transpose(3, 4).contiguous().flatten(0, 3)


def summed_back(grad: Tensor, bounds: Bounds | None, batch: int, length: int) -> Tensor:
    """Compute the gradient of :func:`summed`: ``[B, T, H, G]`` from ``[N * B * H, C, G]``."""
    chunks = number(length)
    grad = grad.unflatten(0, (chunks, batch, -1)).transpose(2, 3)
    flat = grad.reshape(chunks * batch, CHUNK, -1)
    if bounds is None:
        behind = flat.new_ones(CHUNK, CHUNK).triu().expand(flat.shape[0], -1, -1)
    else:
        behind = bounds.same.flatten(0, 1).float().transpose(-1, -2)
    flat = torch.bmm(behind, flat).view(2, chunks // 2, *grad.shape[1:])
    return flat.permute(2, 1, 0, 3, 4, 5).flatten(1, 3)[:, :length]


def decays(sums: Tensor, bounds: Bounds | None) -> Decays:
    """Compute the decays that sums of gates ``[M, C, G]`` amount to."""
    lead, trail = sums, sums[:, -1:] - sums
    if bounds is not None:
        lead, trail = (_cut_off(x, ~there) for x, there in ((lead, bounds.carried), (trail, bounds.kept)))
    lead = lead.exp()
    return Decays(lead, trail.exp(), lead[:, -1])


def _cut_off(x: Tensor, mask: Tensor) -> Tensor:
    by_row = x.unflatten(0, (*mask.shape[:2], -1))
    return by_row.masked_fill(mask, float("-inf")).flatten(0, 2)
