"""Draw random numbers as torch_npu's generator says: its seed and offset decide, so that saved states reproduce."""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Iterator

import torch
from torch_npu import npu

STEP = 4  # torch_npu's Philox offsets are multiples of four


def host_generator(generator: torch.Generator | None, device: torch.device | None) -> torch.Generator:
    """Make a CPU generator for one operator call, and move the NPU generator on."""
    seed, offset = draw(generator, device)
    return seeded(seed, offset)


def draw(generator: torch.Generator | None, device: torch.device | None = None) -> tuple[int, int]:
    """Return the seed and offset for one operator call, and move the NPU generator on."""
    if generator is None:
        npu.init()  # default_generators is empty before
        index = npu.current_device() if device is None or device.index is None else device.index
        generator = npu.default_generators[index]
    draws = getattr(_thread, "draws", None)
    if draws is not None:
        return draws.next(generator)
    offset = generator.get_offset()
    generator.set_offset(offset + STEP)
    return generator.initial_seed(), offset


def seeded(seed: int, offset: int) -> torch.Generator:
    """Make the CPU generator that belongs to a seed and an offset."""
    # splitmix64 of both, so that neighbouring offsets give unrelated streams
    mixed = (seed * 0x9E3779B97F4A7C15 + offset * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) % 2**64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    return torch.Generator().manual_seed((mixed ^ (mixed >> 27)) % 2**63)


@contextlib.contextmanager
def default_generator(generator: torch.Generator) -> Iterator[None]:
    """Let ``generator`` serve as the CPU's default one, for operators that take none."""
    state = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        yield
    finally:
        torch.default_generator.set_state(state)


class Draws:
    """Hold what one captured call draws: offsets within its graph, to which a replay adds where the generator is.

    torch_npu keeps the offset within the graph in the generator (NPUGeneratorImpl.cpp, ``offset_intragraph_``), where
    ``get_state`` and ``set_state`` reach it. Before a replay it moves the generator on by all that the graph draws.
    """

    def __init__(self) -> None:
        self._taken: list[tuple[torch.Generator, int]] = []
        self._drawn_by_graph: list[int] = []
        self._next = 0

    def next(self, generator: torch.Generator) -> tuple[int, int]:
        """Return the seed and offset of the next draw, of ``generator`` if it is new."""
        if self._next == len(self._taken):
            seed, offset = _state(generator)
            generator.set_state(torch.tensor(list(_STATE.pack(seed, offset + STEP)), dtype=torch.uint8))
            self._taken.append((generator.graphsafe_get_state(), offset))
        state, offset = self._taken[self._next]
        if self._drawn_by_graph:
            offset += state.get_offset() - self._drawn_by_graph[self._next]
        self._next += 1
        return state.initial_seed(), offset

    def again(self) -> None:
        """Begin with the first draw again."""
        self._next = 0

    def end_of_capture(self) -> None:
        """Note how much the whole graph draws from each generator."""
        self._drawn_by_graph = [_state(generator)[1] for generator, _ in self._taken]


_thread = threading.local()
_STATE = struct.Struct("=QQ")  # as NPUGeneratorImpl::get_state lays it out


def _state(generator: torch.Generator) -> tuple[int, int]:
    """Return the seed and offset of a generator, within the graph that is captured."""
    seed, offset = _STATE.unpack(bytes(generator.get_state().tolist()))
    return seed, offset


@contextlib.contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Let what is drawn come from a captured call."""
    _thread.draws = draws
    draws.again()
    try:
        yield
    finally:
        _thread.draws = None


def again() -> None:
    """Let what is drawn come from the first draw of the captured call again."""
    _thread.draws.again()
