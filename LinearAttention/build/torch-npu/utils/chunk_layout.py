"""Tokens in chunks: ``[B, T, H, D]`` as ``[N * B * H, C, D]`` in float32, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._common.functorch import is_transformed

CHUNK = 64  # tokens of a chunk, C


def to_chunks(x: Tensor, groups: int = 1, factor: Tensor | None = None) -> Tensor:
    """Copy ``[B, T, H, D]`` into chunks, each head ``groups`` times; the last one is filled up with zeros.

    Args:
        x: the tokens.
        groups: how many times each head is copied.
        factor: what they are multiplied with on the way, ``[B, T, H, 1]`` in float32.

    Returns:
        ``[N * B * H * groups, C, D]`` in float32, contiguous.
    """
    x = _by_head(x, groups)
    if factor is None:
        return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous().flatten(0, -3)
    factor = _by_head(factor, groups)
    if is_transformed() or torch.compiler.is_compiling():  # which write into nothing that is given
        return (x * factor).contiguous().flatten(0, -3)
    return torch.mul(x, factor, out=factor.new_empty(x.shape)).flatten(0, -3)


def from_chunks(
    y: Tensor, batch: int, length: int, dtype: torch.dtype, groups: int = 1, factor: Tensor | None = None
) -> Tensor:
    """Copy chunks back; what the heads of a group give is summed.

    Args:
        y: ``[N * B * H * groups, C, D]``.
        batch: B.
        length: T, without what the last chunk was filled up with.
        dtype: of the result.
        groups: how many times each head was copied.
        factor: what they are multiplied with on the way, ``[B, T, H, 1]`` in float32.

    Returns:
        ``[B, T, H, D]``.
    """
    y = y.unflatten(0, (-1, groups)).sum(1) if groups > 1 else y
    y = y if factor is None else y * to_chunks(factor)
    y = y.to(dtype)  # before it is turned, which moves half as much of 16 bits
    y = y.unflatten(0, (number(length), batch, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return y[:, :length].contiguous()


def by_group(x: Tensor, shared: int) -> Tensor:
    """View ``[M, C, D]`` as ``[M / shared, shared * C, D]``: chunks of heads that share a key in a row."""
    return x.unflatten(0, (-1, shared)).flatten(1, 2)


def by_head(x: Tensor, shared: int) -> Tensor:
    """View ``[M / shared, shared * C, D]`` as ``[M, C, D]``, as it was before :func:`by_group`."""
    return x.unflatten(1, (shared, -1)).flatten(0, 1)


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """View the blocks on the diagonal of ``[M, C, C]``: ``[M, C / size, size, size]``."""
    blocks = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1)


def filled_up(x: Tensor) -> Tensor:
    """Return ``[B, T, ...]`` with zeros up to a whole number of chunks."""
    missing = -x.shape[1] % CHUNK
    return nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x


def number(length: int) -> int:
    """Return how many chunks hold so many tokens."""
    return -(-length // CHUNK)


def _by_head(x: Tensor, groups: int) -> Tensor:
    """View ``[B, T, H, D]`` as ``[N, B, H, C, D]``, or as ``[N, B, H, groups, C, D]``."""
    x = filled_up(x).unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4)
    return x if groups == 1 else x.unsqueeze(3).expand(-1, -1, -1, groups, -1, -1)
