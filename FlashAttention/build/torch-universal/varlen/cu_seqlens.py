"""Cumulative lengths of packed sequences, ``cu_seqlens``: read by the host once, and compared on the device.

A read lets the host wait for all that was launched before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._common.captures import capturing
from .._common.checkpoints import unseen_by_checkpoints

# tensor -> its version when it was read, and the ends of its sequences
_read_ends: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def sequence_ends(cu_seqlens: Tensor) -> tuple[int, ...]:
    """Return where each packed sequence ends.

    What was read of a tensor is remembered while the tensor lives and nobody writes to it. Tensors that were made in
    inference mode do not tell whether somebody has; they are read each time. While a graph is captured nothing is
    remembered, and reading raises: each replay would use the lengths of the capture.

    Args:
        cu_seqlens: ``[1 + sequences]``, integers that begin with zero.
    """
    is_remembered = not cu_seqlens.is_inference() and not capturing()
    if is_remembered and _is_read(cu_seqlens):
        return _read_ends[cu_seqlens][1]
    with unseen_by_checkpoints():
        ends = ends_from_list(cu_seqlens.tolist())
    if is_remembered:
        _read_ends[cu_seqlens] = (cu_seqlens._version, ends)
    return ends


def ends_from_list(cu_seqlens: Sequence[int]) -> tuple[int, ...]:
    """Return where each packed sequence ends, of cumulative lengths on the host."""
    if cu_seqlens and cu_seqlens[0] != 0:
        raise ValueError(f"the lengths of packed sequences must begin with 0, got {', '.join(map(str, cu_seqlens))}")
    return tuple(map(int, cu_seqlens[1:]))


def require_ends_within(name: str, what: str, ends: tuple[int, ...], tokens: int) -> None:
    """Raise if sequences end in another order, or beyond ``tokens``: the argument ``what`` of the function ``name``."""
    if any(end < start for start, end in zip((0, *ends), ends)) or (ends and ends[-1] > tokens):
        raise ValueError(f"{name}: {what} must ascend from 0 to at most {tokens}, got 0, {', '.join(map(str, ends))}")


def read_together(*cumulative: Tensor) -> None:
    """Read several tensors while the host waits once; :func:`sequence_ends` knows them from then on.

    Args:
        cumulative: ``[1 + sequences]`` each, of one dtype and device. What is known already is not read again.
    """
    if capturing():
        return
    unknown = [tensor for tensor in cumulative if not tensor.is_inference() and not _is_read(tensor)]
    if len(unknown) < 2:
        return
    with unseen_by_checkpoints():
        values = torch.cat(unknown).cpu().split([len(tensor) for tensor in unknown])
    for tensor, read in zip(unknown, values):
        _read_ends[tensor] = (tensor._version, ends_from_list(read.tolist()))


def cross_sequence_mask(
    batch: int, queries: int, keys: int, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, device: torch.device
) -> Tensor:
    """Return which keys are in another sequence than a query, without a read of the host.

    Args:
        batch: the batch size; the tokens of the whole batch lie one behind the other.
        queries: the number of queries of each batch index.
        keys: likewise.
        cu_seqlens_q: ``[1 + sequences]``, of the queries.
        cu_seqlens_k: likewise, of the keys.
        device: where the result is.

    Returns:
        bool ``[B, 1, S_q, S_k]``, True where query and key are in two sequences.
    """
    query_sequences = sequence_indices(batch, queries, cu_seqlens_q, device)
    return query_sequences.unsqueeze(-1) != sequence_indices(batch, keys, cu_seqlens_k, device).unsqueeze(-2)


def sequence_indices(batch: int, tokens: int, cu_seqlens: Tensor, device: torch.device) -> Tensor:
    """Return the index of each token's sequence, ``[B, 1, tokens]``, without a read of the host."""
    indices = torch.arange(batch * tokens, device=device)
    return (indices.unsqueeze(-1) >= cu_seqlens[1:].to(device)).sum(-1).view(batch, 1, tokens)


def _is_read(cu_seqlens: Tensor) -> bool:
    known = _read_ends.get(cu_seqlens)
    return known is not None and known[0] == cu_seqlens._version
