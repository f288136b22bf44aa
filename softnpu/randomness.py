"""Draw random numbers as torch_npu's generator says: its seed and offset decide, so that saved states reproduce."""

from __future__ import annotations

import contextlib
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
