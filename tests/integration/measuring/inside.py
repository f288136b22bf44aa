"""What runs on the device for each call of a test, seen one by one."""

import torch
from torch import Tensor

from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.inside import Inside


class Seen(Cost):
    """Keeps what runs for each call, as CANN 9.1 runs it."""

    def __init__(self) -> None:
        super().__init__()
        self._cann = (9, 1)
        self.runs: list[Inside] = []

    def count(self, *call):
        runs = super().count(*call)
        if runs is not None:
            self.runs.append(runs)
        return runs

    @property
    def ran(self) -> list[tuple[str, int]]:
        """The kernels of all calls, by name, and the bytes that each moves."""
        return [(kernel.name, kernel.moved) for runs in self.runs for kernel in runs.kernels]


def bf16(*shape: int) -> Tensor:
    """Return ones in bfloat16 on the NPU."""
    return torch.ones(shape, dtype=torch.bfloat16, device="npu")
