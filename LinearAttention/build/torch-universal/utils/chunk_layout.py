"""Tokens in chunks: ``[B, T, H, D]`` as ``[N * B * H, C, D]`` in float32, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._common.derivatives import is_transformed

CHUNK = 64  # tokens of a chunk, C


def to_chunks(x: Tensor, copies: int = 1, factor: Tensor | None = None) -> Tensor:
    """Copy ``[B, T, H, D]`` into chunks; the last one is filled up with zeros.

    Args:
        x: the tokens.
        copies: how many times each head is copied.
        factor: what the tokens are multiplied with on the way, ``[B, T, H, 1]`` in float32.

    Returns:
        ``[N * B * H * copies, C, D]`` in float32, contiguous.
    """
    x = _view_chunks(x, copies)
    if factor is None:
        return x.to(torch.float32, memory_format=torch.contiguous_format).contiguous().flatten(0, -3)
    factor = _view_chunks(factor, copies)
    if is_transformed() or torch.compiler.is_compiling():  # both refuse ``out=``
        return (x * factor).contiguous().flatten(0, -3)
    return torch.mul(x, factor, out=factor.new_empty(x.shape)).flatten(0, -3)


def from_chunks(
    y: Tensor, batch: int, length: int, dtype: torch.dtype, copies: int = 1, factor: Tensor | None = None
) -> Tensor:
    """Copy chunks back into tokens; the copies of a head are summed.

    Args:
        y: ``[N * B * H * copies, C, D]``.
        batch: B.
        length: T, without what the last chunk was filled up with.
        dtype: of the result.
        copies: how many times each head was copied.
        factor: what the tokens are multiplied with on the way, ``[B, T, H, 1]`` in float32.

    Returns:
        ``[B, T, H, D]``.
    """
    y = y.unflatten(0, (-1, copies)).sum(1) if copies > 1 else y
    y = y if factor is None else y * to_chunks(factor)
    y = y.to(dtype)  # before it is transposed, which moves half as many bytes in a dtype of 16 bits
    y = y.unflatten(0, (num_chunks(length), batch, -1)).permute(1, 0, 3, 2, 4).flatten(1, 2)
    return y[:, :length].contiguous()


def stack_heads(x: Tensor, heads_per_key: int) -> Tensor:
    """View ``[M, C, D]`` as ``[M / heads_per_key, heads_per_key * C, D]``: one matrix for the heads of a key."""
    return x.unflatten(0, (-1, heads_per_key)).flatten(1, 2)


def unstack_heads(x: Tensor, heads_per_key: int) -> Tensor:
    """View ``[M / heads_per_key, heads_per_key * C, D]`` as ``[M, C, D]``, as it was before :func:`stack_heads`."""
    return x.unflatten(1, (heads_per_key, -1)).flatten(0, 1)


def pad_to_chunks(x: Tensor) -> Tensor:
    """Return ``[B, T, ...]`` with zeros behind the tokens, up to a whole number of chunks."""
    missing = num_chunks(x.shape[1]) * CHUNK - x.shape[1]
    return nn.functional.pad(x, (0, 0) * (x.dim() - 2) + (0, missing)) if missing else x


def num_chunks(length: int) -> int:
    """Return how many chunks so many tokens take."""
    return -(-length // CHUNK)


def _view_chunks(x: Tensor, copies: int) -> Tensor:
    """View ``[B, T, H, D]`` as ``[N, B, H, C, D]``, or as ``[N, B, H, copies, C, D]``."""
    # every number of chunks is written alike: a compiler would prove for minutes that two ways to count them agree
    x = pad_to_chunks(x).unflatten(1, (num_chunks(x.shape[1]), CHUNK)).permute(1, 0, 3, 2, 4)
    return x if copies == 1 else x.unsqueeze(3).expand(-1, -1, -1, copies, -1, -1)
