"""What a line of a selftest is that calls an operator alone: what it has to give, and which releases do not give it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_npu import npu

from kernels_ext_npu.machine.cann_releases import Release, parse_release
from kernels_ext_npu.selftest import comparing
from kernels_ext_npu.selftest.comparing import Results

OLDEST, NEVER = (0, 0), (99, 0)
DTYPE = torch.float16
Pair = tuple[list[Tensor], list[Tensor]]  # what the NPU gives, and what it has to, in float64


@dataclass(frozen=True)
class OperatorCall:
    """A call of an operator alone."""

    title: str  # the operator, and what it is given
    compute: Callable[[], Pair]  # calls it, and gives both sides of the comparison
    since: Release = OLDEST  # the first release that takes it, as its sources say; NEVER for none
    dtype: torch.dtype = DTYPE  # the dtype of the compared results
    unwritten_since: Release = NEVER  # the first release that takes it, and leaves what is compared unwritten

    @property
    def is_refused(self) -> bool:
        """Whether the sources of this release refuse it; of one that cannot be read, those of the oldest."""
        return _release() < self.since

    def ask(self) -> dict[str, Any]:
        """Call it, and return what was found; what the device raises, it raises."""
        found, exact = self.compute()
        forward = comparing.difference(Results(found, [None]), Results(exact, [None])).forward
        tolerance = comparing.TOLERANCE[self.dtype]
        answer: dict[str, Any] = {"forward": forward, "backward": 0.0, "tolerance": tolerance}
        is_right = forward <= tolerance
        says = "refuse it" if self.is_refused else "leave it unwritten" if _release() >= self.unwritten_since else ""
        if not says:
            return answer | {"agrees": is_right}
        if not is_right and not self.is_refused:
            return {"agrees": True, "refused": "left unwritten, as the sources of this CANN say"}
        how = "rightly" if is_right else "wrongly"
        return answer | {"agrees": False, "error": f"computed, {how}, where the sources of this CANN {says}"}


def launched(call: Callable[[], Tensor], captured: bool) -> Tensor:
    """Return what a call gives: launched at once, or captured in a graph that is replayed then."""
    if not captured:
        return call()
    graph = npu.NPUGraph()
    with npu.graph(graph):
        result = call()
    graph.replay()
    return result


@contextmanager
def deterministic(asked: bool) -> Iterator[None]:
    """Ask for deterministic algorithms, or for none, within the context."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(asked)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _release() -> Release:
    return parse_release(getattr(torch.version, "cann", None))


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    """Draw a tensor on the host, the same each time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
