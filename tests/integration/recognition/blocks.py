"""A block that holds a module somewhere in a model, and what a report says of it."""

from collections.abc import Collection, Iterable

import pytest
import torch
from torch import nn

import softnpu
from tests.support.served import rows

# a layer launches one of them
OPERATORS = "npu_rms_norm", "npu_gemma_rms_norm", "npu_swiglu", "npu_geglu", "npu_clipped_swiglu", "npu_fast_gelu"


class Block(nn.Module):
    """Holds a module somewhere in a model."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.register_buffer("place", torch.zeros(1))

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        result = self.part(*arguments)
        return result[0] if isinstance(result, tuple) else result


def launched(call, operators: tuple[str, ...] = OPERATORS) -> int:
    softnpu.reset_counters()
    call()
    return sum(softnpu.counters().get(name, 0) for name in operators)


def quickly(cases: Iterable, quick: Collection) -> list:
    """Mark all cases but a few as long: each takes about a second."""
    return [pytest.param(case, marks=() if case in quick else pytest.mark.long) for case in cases]


def said(model: nn.Module) -> list[tuple[str | None, bool]]:
    return [(row.kernel, row.swapped) for row in rows(model) if row.path == "part"]
