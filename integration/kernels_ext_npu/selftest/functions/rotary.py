"""Rotations, with heads, positions and layouts at and around the limits of ``npu_rotary_mul``."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from kernels_ext_npu.selftest.cases import at_limits

SECTION = [2, 3, 3]
# what is rotated, and cos and sin; limits: heads smaller than 896, fewer than 1,000 of the heads, B·N <= 8·S
ONE = {
    "": ((2, 4, 6, 16), (2, 1, 6, 16)),
    "one position": ((1, 4, 1, 64), (1, 1, 1, 64)),
    "a decode step of 16 rows": ((16, 4, 1, 64), (16, 1, 1, 64)),
    "a head of 80": ((1, 2, 5, 80), (1, 1, 5, 80)),
    "a head of 894": ((1, 1, 3, 894), (1, 1, 3, 894)),
    "a head of 896": ((1, 1, 3, 896), (1, 1, 3, 896)),
    "999 heads": ((1, 999, 2, 16), (1, 1, 2, 16)),
    "1,000 heads": ((1, 1000, 2, 16), (1, 1, 2, 16)),
    "a row of cos for each head": ((2, 4, 6, 16), (2, 4, 6, 16)),
}
BOTH = {
    "": ((2, 4, 6, 16), (2, 2, 6, 16), (2, 6, 16)),
    "one position": ((3, 4, 1, 64), (3, 1, 1, 64), (3, 1, 64)),
    "2,049 positions": ((1, 2, 2049, 16), (1, 1, 2049, 16), (1, 2049, 16)),
    "a head of 128": ((1, 8, 9, 128), (1, 2, 9, 128), (1, 9, 128)),
}


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def both_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return tuple(rotated(x, cos.unsqueeze(1), sin.unsqueeze(1)) for x in (q, k))


def multimodal(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(t.split(SECTION * 2, -1))], -1) for t in (cos, sin))
    return both_rotated(q, k, cos, sin)


_at_limits = partial(at_limits, "RoPE")
_one = {at: (*shapes, shapes[-1]) for at, shapes in ONE.items()}  # cos and sin are of one shape
_both = {at: (*shapes, shapes[-1]) for at, shapes in BOTH.items()}
_neighbours = {f"neighbours{', ' * bool(at)}{at}": shapes for at, shapes in _one.items() if "894" not in at}
_sectioned = {"": ((2, 4, 6, 16), (2, 2, 6, 16), (3, 2, 6, 16), (3, 2, 6, 16))}
FUNCTIONS = (
    *_at_limits("rotary_mul", lambda f, *t: f(*t), rotated, _one),
    *_at_limits("rotary_mul", lambda f, *t: f(*t, True), rotated_pairs, _neighbours),
    *_at_limits("apply_rotary_pos_emb", lambda f, *t: f(*t), both_rotated, _both),
    *_at_limits("apply_multimodal_rotary_pos_emb", lambda f, *t: f(*t, SECTION), multimodal, _sectioned),
)
