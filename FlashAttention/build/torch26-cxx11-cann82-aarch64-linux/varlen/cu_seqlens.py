"""Lengths of sequences on the host: read from the device once, however many layers want them.

A read lets the host wait for all that was launched before it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._common.captures import capturing
from ..selective_checkpoints import unseen

# the values of cumulative lengths, with the version of the tensor that they were read from
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class _Waiting(threading.local):
    """Holds what waits in each thread: what another one has launched may be on a stream that nobody has waited for."""

    def __init__(self) -> None:
        self.values: WeakSet[HostValues] = WeakSet()


_waiting = _Waiting()


class HostValues:
    """Holds a tensor of integers or booleans, and its values on the host once they are wanted.

    All of a thread that are waiting on a device are read together: a model with several kinds of masks lets the host
    wait once.

    >>> padding, packed = HostValues(padding_mask), HostValues(sequence_ids)
    >>> padding.values  # reads both
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._values: Tensor | None = None
        _waiting.values.add(self)

    @property
    def values(self) -> Tensor:
        """Return the values, int32 on the CPU, in the shape of the tensor."""
        if self._values is None:
            _read([self, *(other for other in _waiting.values if other is not self and self._goes_with(other))])
            assert self._values is not None
        return self._values

    def _goes_with(self, other: HostValues) -> bool:
        """Tell whether another one can be read with this one: a thread that did not make it may have read it."""
        return other._values is None and other.tensor.device == self.tensor.device

    def _take(self, values: Tensor) -> None:
        self._values = values.view(self.tensor.shape)
        _waiting.values.discard(self)


def ends_of(cumulative: Tensor) -> tuple[int, ...]:
    """Return where each sequence of a packed batch ends.

    What was read of a tensor is remembered as long as the tensor lives and nobody writes to it. Of tensors that were
    made in inference mode torch does not tell whether somebody did; those are read each time. While a graph is captured
    nothing is remembered: its lengths would stay as they were, and so reading them raises.

    Args:
        cumulative: ``[1 + sequences]``, integers that begin with zero.
    """
    followed = not cumulative.is_inference() and not capturing()
    if followed and _is_known(cumulative):
        return _known[cumulative][1]
    with unseen():
        ends = ends_in(cumulative.tolist())
    if followed:
        _known[cumulative] = (cumulative._version, ends)
    return ends


def ends_in(cumulative: Sequence[int]) -> tuple[int, ...]:
    """Return where each sequence ends, of numbers that say where each begins and where the last one ends."""
    if cumulative and cumulative[0] != 0:
        raise ValueError(f"the lengths of packed sequences must begin with 0, got {', '.join(map(str, cumulative))}")
    return tuple(map(int, cumulative[1:]))


def require_within(name: str, what: str, ends: tuple[int, ...], tokens: int) -> None:
    """Raise what the function ``name`` says of lengths ``what`` that do not fit so many tokens."""
    if any(end < start for start, end in zip((0, *ends), ends)) or (ends and ends[-1] > tokens):
        raise ValueError(f"{name}: {what} must ascend from 0 to at most {tokens}, got 0, {', '.join(map(str, ends))}")


def read_together(*cumulative: Tensor) -> None:
    """Let the host wait once for the lengths of several tensors, which `ends_of` then knows.

    Args:
        cumulative: ``[1 + sequences]`` each, of one dtype and device. What is known already is not read again.
    """
    if capturing():
        return
    unknown = [tensor for tensor in cumulative if not tensor.is_inference() and not _is_known(tensor)]
    if len(unknown) < 2:
        return
    with unseen():
        values = torch.cat(unknown).cpu().split([len(tensor) for tensor in unknown])
    for tensor, read in zip(unknown, values):
        _known[tensor] = (tensor._version, ends_in(read.tolist()))


def in_other_sequences(
    batch: int, queries: int, keys: int, cumulative: Tensor, key_cumulative: Tensor, device: torch.device
) -> Tensor:
    """Mark the keys that are in another sequence than a query. The host reads nothing.

    Args:
        batch: how many rows there are, whose tokens lie one behind the other.
        queries: how many a row has.
        keys: likewise.
        cumulative: ``[1 + sequences]``, of the queries.
        key_cumulative: likewise, of the keys.
        device: where the result is.

    Returns:
        bool ``[B, 1, S_q, S_k]``.
    """
    of_queries = sequences_of(batch, queries, cumulative, device)
    return of_queries.unsqueeze(-1) != sequences_of(batch, keys, key_cumulative, device).unsqueeze(-2)


def sequences_of(batch: int, tokens: int, cumulative: Tensor, device: torch.device) -> Tensor:
    """Count the sequences that end before each token, ``[B, 1, tokens]``. The host reads nothing."""
    places = torch.arange(batch * tokens, device=device)
    return (places.unsqueeze(-1) >= cumulative[1:].to(device)).sum(-1).view(batch, 1, tokens)


def _is_known(cumulative: Tensor) -> bool:
    known = _known.get(cumulative)
    return known is not None and known[0] == cumulative._version


def _read(waiting: list[HostValues]) -> None:
    parts = [value.tensor.reshape(-1) for value in waiting]
    together = parts[0] if len(parts) == 1 else torch.cat([part.to(torch.int32) for part in parts])
    found = together.cpu().to(torch.int32)
    for value, values in zip(waiting, found.split([part.numel() for part in parts])):
        value._take(values)
