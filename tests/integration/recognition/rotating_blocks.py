"""What rotates, held by a block or called: what its calls launch, and what they are given and give."""

import torch
from torch import Tensor, nn

import kernels_ext_npu
import softnpu

OPERATORS = ("npu_rotary_mul", "npu_mrope")


class Block(nn.Module):
    """Holds a module somewhere in a model."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.place = nn.Parameter(torch.zeros(1))

    def forward(self, *args, **kwargs):
        return self.part(*args, **kwargs)


def counted(call) -> dict[str, int]:
    softnpu.reset_counters()
    call()
    return {name: count for name, count in softnpu.counters().items() if count}


def launched(call) -> int:
    counts = counted(call)
    return sum(counts.get(name, 0) for name in OPERATORS)


def on(device: str, values, dtype: torch.dtype | None = None):
    """Move tensors, also in tuples, and cast those of floats."""
    if isinstance(values, Tensor):
        return values.to(device, dtype if values.is_floating_point() else None)
    return tuple(on(device, value, dtype) for value in values) if isinstance(values, tuple) else values


def as_list(results) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


def kernelized(part: nn.Module) -> nn.Module:
    return kernels_ext_npu.kernelize(Block(part).to("npu"))


def assert_same(ours, theirs) -> None:
    for mine, other in zip(as_list(ours), as_list(theirs), strict=True):
        torch.testing.assert_close(mine.cpu(), other, rtol=1e-5, atol=1e-5)  # products of float32 in another order
