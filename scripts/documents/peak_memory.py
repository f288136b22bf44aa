"""Draw the peak memory of a training step over its tokens, as `kernels-ext-npu inspect --checkpointing` finds it."""

from __future__ import annotations

from pathlib import Path

import softnpu  # noqa: F401  before torch
from kernels_ext_npu.inspection import picture, subject
from kernels_ext_npu.inspection.inspecting import inspect
from kernels_ext_npu.inspection.roofline import SOCS

MODEL = "Gemma-3-12B"
PICTURE = "docs/peak-memory.png"
TOKENS = tuple(2**power for power in range(11, 18))


def draw(root: Path) -> None:
    """Write the picture anew."""
    picture.plot_peaks(MODEL, peaks(), root / PICTURE)


def peaks() -> dict[int, tuple[float, float]]:
    """Return the GB of a step with gradient checkpointing by its tokens, without kernels and with all."""
    found = {}
    for tokens in TOKENS:
        before, after = (
            variant.counts["step"]
            for variant in inspect(subject.find(MODEL), SOCS["910b"], tokens=tokens, checkpointing=True).variants
        )
        assert before is not None
        assert after is not None
        found[tokens] = before.peak / 1e9, after.peak / 1e9
    return found
