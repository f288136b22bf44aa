"""What runs on the device for each call of a test, one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.inside import Inside


class Recorder(Cost):
    """Keeps what runs for each call within the context, on a release of CANN."""

    def __init__(self, cann: tuple[int, int] = (9, 1)) -> None:
        super().__init__()
        self._cann = cann
        self.runs: list[Inside] = []

    def count(self, *call: Any) -> Inside | None:
        runs = super().count(*call)
        if runs is not None:
            assert runs.is_read, call[0]
            self.runs.append(runs)
        return runs

    @property
    def ran(self) -> list[tuple[str, int]]:
        """The kernels of all calls, by name, and the bytes that each moves."""
        return [(kernel.name, kernel.moved) for runs in self.runs for kernel in runs.kernels]

    @property
    def on_ai_cpu(self) -> list[str]:
        return [kernel.name for runs in self.runs for kernel in runs.kernels if kernel.on_ai_cpu]


def recorded(call: Callable[[], Any], cann: tuple[int, int] = (9, 1)) -> Recorder:
    with Recorder(cann) as recorder:
        call()
    return recorder


def runs(call: Callable[[], Any], cann: tuple[int, int] = (9, 1)) -> list[tuple[str, int]]:
    return recorded(call, cann).ran


def bf16(*shape: int) -> Tensor:
    """Return ones in bfloat16 on the NPU."""
    return torch.ones(shape, dtype=torch.bfloat16, device="npu")
