"""Count the collectives that a process calls: how often, and how many bytes its devices send to each other."""

from __future__ import annotations

import threading
from typing import NamedTuple


class Collective(NamedTuple):
    """Name a collective operator in a process group.

    Attributes:
        operator: ``all_reduce``, ``reduce``, ``broadcast``, ``all_gather``, ``reduce_scatter``, ``all_to_all``,
            ``scatter``, ``gather``, ``send``, ``recv`` or ``barrier``, in each of its forms.
        group: the name of the process group.
        ranks: how many processes it has.
    """

    operator: str
    group: str
    ranks: int


class Traffic(NamedTuple):
    """Say how much went through a collective.

    Attributes:
        calls: how often this process called it.
        bytes: the size of its messages, the same on every rank of an even collective. ``all_reduce``, ``reduce``,
            ``broadcast``, ``send`` and ``recv``: of the tensor. ``all_gather``, ``gather``, ``scatter`` and
            ``reduce_scatter``: of the parts of all ranks together. ``all_to_all``: of what this process gives, its own
            part included. ``barrier``: none. A coalesced call counts once, with all its tensors.
    """

    calls: int
    bytes: int


_traffic: dict[Collective, Traffic] = {}
_lock = threading.Lock()  # backward runs in a thread of its own


def count_collective(collective: Collective, size: int) -> None:
    """Count a call with messages of ``size`` bytes."""
    with _lock:
        calls, total = _traffic.get(collective, Traffic(0, 0))
        _traffic[collective] = Traffic(calls + 1, total + size)


def collectives() -> dict[Collective, Traffic]:
    """Return what this process called since the last ``reset_counters()``, in any group named ``hccl``.

    Example:
        >>> import softnpu
        >>> import torch
        >>> import torch.distributed as dist
        >>> dist.init_process_group("hccl", store=dist.HashStore(), rank=0, world_size=1)
        >>> dist.all_reduce(torch.ones(4, device="npu"))
        >>> softnpu.collectives()
        {Collective(operator='all_reduce', group='0', ranks=1): Traffic(calls=1, bytes=16)}
        >>> dist.destroy_process_group()
    """
    with _lock:
        return dict(_traffic)


def forget_collectives() -> None:
    """Drop all counts of collectives."""
    with _lock:
        _traffic.clear()
