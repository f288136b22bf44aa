"""How much memory of the device a call holds at its peak, beyond what was held before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch_npu


class Peak:
    """The bytes that were asked for at the peak within a context, 0 before its end; blocks of memory are larger."""

    bytes: int = 0


@contextmanager
def peak() -> Iterator[Peak]:
    """Measure the peak within the context; collect garbage before where it would be freed in between."""
    torch_npu.npu.reset_peak_memory_stats()
    found, before = Peak(), _requested("current")
    yield found
    found.bytes = _requested("peak") - before


def _requested(when: str) -> int:
    return torch_npu.npu.memory_stats()[f"requested_bytes.all.{when}"]
