"""Which values of a head are rotated together: the two halves of it, or neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Layout(NamedTuple):
    """How the first and the second values of all pairs lie in the last dimension, ``[..., D]``."""

    split: Callable[[Tensor], tuple[Tensor, ...]]
    join: Callable[[Tensor, Tensor], Tensor]


HALVES = Layout(lambda x: x.chunk(2, -1), lambda first, second: torch.cat((first, second), -1))
NEIGHBOURS = Layout(
    lambda x: (x[..., ::2], x[..., 1::2]), lambda first, second: torch.stack((first, second), -1).flatten(-2)
)


class Pairing(NamedTuple):
    """How the pairs of a head lie in what is rotated, and in what comes out, and the layer that rotates them so."""

    layer: str
    taken: Layout
    given: Layout

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, rotary_mul: Callable[..., Tensor]) -> Tensor:
        """Rotate ``[..., D]`` by cos and sin ``[..., R]``, which lie as what comes out; the rest is passed through."""
        width = cos.shape[-1]
        part, rest = (x, None) if width == x.shape[-1] else x.split((width, x.shape[-1] - width), -1)
        if self.taken is not self.given:
            part = self.given.join(*self.taken.split(part))
        turned = rotary_mul(part, cos, sin, self.given is NEIGHBOURS)
        return turned if rest is None else torch.cat((turned, rest.to(turned.dtype)), -1)


PAIRINGS = (
    Pairing("RotaryPosEmb", HALVES, HALVES),
    Pairing("RotaryPosEmbInterleaved", NEIGHBOURS, NEIGHBOURS),
    Pairing("RotaryPosEmbDeinterleaved", NEIGHBOURS, HALVES),
)


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Compute ``x * cos + rotated(x) * sin`` in torch, where pairs ``[x1, x2]`` are rotated into ``[-x2, x1]``."""
    layout = NEIGHBOURS if interleaved else HALVES
    first, second = layout.split(x)
    return x * cos + layout.join(-second, first) * sin
