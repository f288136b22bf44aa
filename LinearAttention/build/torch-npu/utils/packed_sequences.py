"""Packed sequences: which sequence of a row each token belongs to, and what that leaves of a chunk.

Chunks stand as if there were one sequence, so that no shape depends on where one ends, and nothing waits for the
lengths. A decay never reaches over a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunk_layout import CHUNK


class Bounds(NamedTuple):
    """Says what the bounds of sequences cut off in chunks.

    Attributes:
        same: ``[N, B, C, C]``, whether a token belongs to the sequence of an earlier one, or of itself.
        carried: ``[N, B, 1, C, 1]``, whether a token belongs to the sequence of the last one of the chunk before.
        kept: ``[N, B, 1, C, 1]``, whether a token belongs to the sequence of the last one of its chunk.
    """

    same: Tensor
    carried: Tensor
    kept: Tensor


def numbers_of(
    batch: int, length: int, device: torch.device, cu_seqlens: Tensor | None, seq_idx: Tensor | None
) -> Tensor | None:
    """Return the number of the sequence of each token, ``[B, T]``; None where each row is one sequence.

    Args:
        batch: B, which is one where ``cu_seqlens`` is given.
        length: T.
        device: where the tokens are.
        cu_seqlens: where each sequence begins, and the last one ends, ``[S + 1]``.
        seq_idx: the numbers themselves, ``[B, T]``; they are taken in place of ``cu_seqlens``.

    Raises:
        ValueError: the shapes do not fit.
        TypeError: they are not int32 or int64.
    """
    for name, given in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if given is not None and given.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {given.dtype}")
    if seq_idx is not None:
        if seq_idx.shape != (batch, length):
            raise ValueError(f"seq_idx {list(seq_idx.shape)} must be [B, T], here [{batch}, {length}]")
        return seq_idx.to(device)
    if cu_seqlens is None:
        return None
    if batch != 1 or cu_seqlens.dim() != 1:
        raise ValueError(
            f"cu_seqlens {list(cu_seqlens.shape)} must be [S + 1] and go with a batch of one row, not {batch}: "
            "pack all sequences into one row"
        )
    places = torch.arange(length, device=device)
    return (places.unsqueeze(-1) >= cu_seqlens.to(device)).sum(-1).unsqueeze(0)


def bounds(numbers: Tensor, before: Tensor | None) -> Bounds:
    """Return what bounds cut off.

    Args:
        numbers: the sequences of the tokens, ``[B, T]``.
        before: those of the tokens before them, ``[B, 1]``; None where these are the first.
    """
    missing = -numbers.shape[1] % CHUNK
    numbers = torch.cat([numbers, numbers[:, -1:].expand(-1, missing)], 1) if missing else numbers
    first = numbers[:, :1] if before is None else before
    previous = torch.cat([first, numbers[:, CHUNK - 1 : -1 : CHUNK]], 1).t().unsqueeze(-1)
    chunks = numbers.unflatten(1, (-1, CHUNK)).transpose(0, 1)
    same = (chunks.unsqueeze(-1) == chunks.unsqueeze(-2)).tril()
    carried, kept = chunks == previous, chunks == chunks[..., -1:]
    return Bounds(same, carried[:, :, None, :, None], kept[:, :, None, :, None])
