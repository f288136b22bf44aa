"""Integer tensors whose values the host needs, read together: a read waits for all that was launched before it."""

from __future__ import annotations

import threading
from weakref import WeakSet

import torch
from torch import Tensor


class _Unread(threading.local):
    """Holds what each thread has not read yet: another thread's tensor may be computed on a stream nobody waits for."""

    def __init__(self) -> None:
        self.values: WeakSet[HostValues] = WeakSet()


_unread = _Unread()


class HostValues:
    """A tensor of integers or booleans whose values are copied to the host when they are first needed.

    All unread tensors of a thread on one device are read together: a model with several kinds of masks lets the host
    wait once.

    >>> padding, packed = HostValues(padding_mask), HostValues(sequence_ids)
    >>> padding.values  # reads both
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._values: Tensor | None = None
        _unread.values.add(self)

    @property
    def values(self) -> Tensor:
        """Return the values, int32 on the CPU, in the shape of the tensor."""
        if self._values is None:
            _read(self)
            assert self._values is not None
        return self._values


def _read(wanted: HostValues) -> None:
    """Read a tensor, and with it the others of this thread on its device, unless another thread has read them."""
    others = (other for other in _unread.values if other is not wanted and other._values is None)
    unread = [wanted, *(other for other in others if other.tensor.device == wanted.tensor.device)]
    flat = [value.tensor.reshape(-1) for value in unread]
    joined = flat[0] if len(flat) == 1 else torch.cat([tensor.to(torch.int32) for tensor in flat])
    found = joined.cpu().to(torch.int32)
    for value, values in zip(unread, found.split([tensor.numel() for tensor in flat])):
        value._values = values.view(value.tensor.shape)
        _unread.values.discard(value)
