"""Counts how often the host waits for the device: by the software device's own count, or by torch's profiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

import softnpu
from softnpu.counting import STREAM_SYNCS

# of operators that read a value on the host, or whose result has as many elements as values say
READING = frozenset(
    f"aten::{name}"
    for name in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim")
)


class Waits:
    """How often the host waited within a context; 0 before its end."""

    number: int = 0


@contextmanager
def counted() -> Iterator[Waits]:
    """Count them: all of them on the software device, and on a card those that operators of torch make."""
    waits = Waits()
    if softnpu.is_software():
        before = softnpu.counters().get(STREAM_SYNCS, 0)
        yield waits
        waits.number = softnpu.counters().get(STREAM_SYNCS, 0) - before
        return
    with profiled() as waits:
        yield waits


@contextmanager
def profiled() -> Iterator[Waits]:
    """Count by torch's profiler the operators that read on the host."""
    waits = Waits()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield waits
    waits.number = sum(event.name in READING and not _is_part(event) for event in profile.events())


def _is_part(event: Any) -> bool:
    """Tell whether an operator runs within another one that reads: what came to the host is read there once more."""
    while (event := event.cpu_parent) is not None:
        if event.name in READING:
            return True
    return False
