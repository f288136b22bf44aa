"""Which collectives were called: what a process made its devices send to each other."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import NamedTuple


class Collective(NamedTuple):
    """A collective operator in a process group.

    Attributes:
        operator: its name in ``torch.distributed``: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``send``.
        group: the name of the process group.
        ranks: how many processes it has.
    """

    operator: str
    group: str
    ranks: int


class Traffic(NamedTuple):
    """What went through a collective.

    Attributes:
        calls: how often this process called it.
        bytes: the size of its messages: of what is reduced, gathered, scattered or sent as a whole.
    """

    calls: int
    bytes: int


_NAMES = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "recv_any_source_": "recv",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
}

_traffic: dict[Collective, Traffic] = {}
_lock = threading.Lock()  # backward runs in a thread of its own


def count_collective(name: str, group: str, ranks: int, sizes: Iterable[int]) -> None:
    """Count a call of a ``c10d::`` operator, given the bytes of each of its arguments."""
    key = Collective(_NAMES.get(name, name.rstrip("_")), group, ranks)
    with _lock:
        calls, total = _traffic.get(key, Traffic(0, 0))
        _traffic[key] = Traffic(calls + 1, total + (0 if key.operator == "barrier" else max(sizes)))


def collectives() -> dict[Collective, Traffic]:
    """What this process called since the last ``reset_counters()``, in any group named ``hccl``."""
    with _lock:
        return dict(_traffic)


def forget_collectives() -> None:
    """Start counting anew."""
    with _lock:
        _traffic.clear()
