"""Random numbers that are drawn for layers before these are called.

Of three layers with dropout the call of the first draws for all of them, in their order. Behind it the generator is put
back to where the first alone would have left it. Each of the others moves it on when it is handed what was drawn for
it. Where something else has drawn in between, or a seed was set, the generator stands elsewhere: then nothing is handed
out, and the layer draws by itself, the numbers that it would have drawn without kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Draw(NamedTuple):
    """What a generator has drawn for a layer: with which seed, and between which offsets."""

    generator: torch.Generator
    seed: int
    start: int
    end: int

    def take(self) -> bool:
        """Move the generator over the draw; False if it does not stand where that begins."""
        stands = self.generator.get_offset() == self.start and self.generator.initial_seed() == self.seed
        if stands:
            self.generator.set_offset(self.end)
        return stands


def are_captured() -> bool:
    """Tell whether a graph is captured, which moves the generator when it is replayed."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    return hasattr(npu, "is_current_stream_capturing") and npu.is_current_stream_capturing()


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator that operators of an NPU draw from; None where there is none yet, as for fake tensors."""
    npu: Any = torch.npu  # type: ignore[attr-defined]
    if not npu.default_generators:
        return None
    return npu.default_generators[npu.current_device() if device.index is None else device.index]


def put_back(generator: torch.Generator, start: int, number: int) -> list[Draw] | None:
    """Put a generator back behind the first of several draws that are alike.

    Args:
        generator: has drawn since, and nothing else has.
        start: its offset before.
        number: of draws.

    Returns:
        The draws behind the first; None, with the generator as it was before, if they were not alike.
    """
    step, rest = divmod(generator.get_offset() - start, number)
    generator.set_offset(start if rest else start + step)
    if rest:
        return None
    seed = generator.initial_seed()
    return [Draw(generator, seed, start + place * step, start + (place + 1) * step) for place in range(1, number)]
