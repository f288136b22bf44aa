"""Packed sequences: which sequence of its row each token belongs to, and which tokens of a chunk share one.

Chunks have the places that they have in a row of one sequence, and masks keep the sequences apart. So no shape depends
on where a sequence ends, and the host waits for no lengths.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .chunk_layout import CHUNK


class SequenceMasks(NamedTuple):
    """Holds which tokens of chunks belong to one sequence.

    Attributes:
        same_sequence: ``[N, B, C, C]``, whether a token (row) belongs to the sequence of an earlier one (column), or is
            that token.
        reads_state: ``[N, B, 1, C, 1]``, whether a token belongs to the sequence of the last token of the chunk before,
            so that it reads the state before its chunk.
        writes_state: ``[N, B, 1, C, 1]``, whether a token belongs to the sequence of the last token of its chunk, so
            that it is part of the state behind it.
    """

    same_sequence: Tensor
    reads_state: Tensor
    writes_state: Tensor


def sequence_ids(
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
    for name, tensor in (("seq_idx", seq_idx), ("cu_seqlens", cu_seqlens)):
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
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


def sequence_masks(seq_idx: Tensor, previous: Tensor | None) -> SequenceMasks:
    """Compute the masks of chunks.

    Args:
        seq_idx: the sequences of the tokens, ``[B, T]``.
        previous: that of the token before the first, ``[B, 1]``; None where there is none.
    """
    missing = -seq_idx.shape[1] % CHUNK
    seq_idx = torch.cat([seq_idx, seq_idx[:, -1:].expand(-1, missing)], 1) if missing else seq_idx
    first = seq_idx[:, :1] if previous is None else previous
    before_chunks = torch.cat([first, seq_idx[:, CHUNK - 1 : -1 : CHUNK]], 1).t().unsqueeze(-1)
    chunks = seq_idx.unflatten(1, (-1, CHUNK)).transpose(0, 1)
    same_sequence = (chunks.unsqueeze(-1) == chunks.unsqueeze(-2)).tril()
    reads_state, writes_state = chunks == before_chunks, chunks == chunks[..., -1:]
    return SequenceMasks(same_sequence, reads_state[:, :, None, :, None], writes_state[:, :, None, :, None])
