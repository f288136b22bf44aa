"""Tokens in chunks: ``[B, T, H, D]`` as ``[N * B * H, C, D]`` in float32, and back.

The first, third, fifth chunk and so on come before the second, fourth, sixth: the recurrence takes two at a time, and
either half is contiguous then. N is even.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CHUNK = 64  # tokens of a chunk, C
PAIR = 2 * CHUNK


def to_chunks(x: Tensor, groups: int = 1) -> Tensor:
    """Copy ``[B, T, H, D]`` into chunks, each head ``groups`` times; the last pair is filled up with zeros.

    Returns:
        ``[N * B * H * groups, C, D]`` in float32, contiguous.
    """
    x = filled_up(x).unflatten(1, (-1, 2, CHUNK)).permute(2, 1, 0, 4, 3, 5)
    if groups > 1:
        x = x.unsqueeze(4).expand(-1, -1, -1, -1, groups, -1, -1)
    return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous().flatten(0, -3)


def from_chunks(y: Tensor, batch: int, length: int, dtype: torch.dtype, groups: int = 1) -> Tensor:
    """Copy chunks back; what the heads of a group give is summed.

    Args:
        y: ``[N * B * H * groups, C, D]``.
        batch: B.
        length: T, without what the last pair was filled up with.
        dtype: of the result.
        groups: how many times each head was copied.

    Returns:
        ``[B, T, H, D]``.
    """
    y = y.unflatten(0, (2, number(length) // 2, batch, -1, groups))
    y = y.sum(4) if groups > 1 else y.squeeze(4)
    y = y.permute(2, 1, 0, 4, 3, 5).to(dtype, memory_format=torch.contiguous_format).contiguous().flatten(1, 3)
    return y[:, :length].contiguous()


def filled_up(x: Tensor) -> Tensor:
    """Return ``[B, T, ...]`` with zeros up to a whole number of pairs of chunks."""
    missing = -x.shape[1] % PAIR
    return nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x


def number(length: int) -> int:
    """Return how many chunks hold so many tokens."""
    return 2 * -(-length // PAIR)


def in_pairs(x: Tensor) -> Tensor:
    """Copy what is there of each chunk in the order of tokens, ``[N, ...]``, into the order of chunks."""
    return x.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


def in_order(x: Tensor) -> Tensor:
    """Copy what is there of each chunk, ``[N, ...]``, into the order of tokens."""
    return x.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)
