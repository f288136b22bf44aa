"""Draw the peak memory of a training step over its tokens, as `kernels-ext-npu inspect --checkpointing` finds it."""

from __future__ import annotations

from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter, NullLocator

import softnpu  # noqa: F401  before torch
from kernels_ext_npu.inspection import subject
from kernels_ext_npu.inspection.inspecting import ALL, ORIGINAL, inspect
from kernels_ext_npu.inspection.picture import AFTER, BEFORE, NOTE
from kernels_ext_npu.measuring.roofline import SOCS

MODEL = "Gemma-3-12B"
PICTURE = "docs/peak-memory.png"
TOKENS = tuple(2**power for power in range(11, 18))


def draw(root: Path) -> None:
    """Write the picture anew."""
    _plot(peaks(), root / PICTURE)


def peaks() -> dict[int, tuple[float, float]]:
    """Return the GB of a step with gradient checkpointing by its tokens, without kernels and with all."""
    found = {}
    for tokens in TOKENS:
        before, after = (
            kernel_set.counts["step"]
            for kernel_set in inspect(subject.find(MODEL), SOCS["910b3"], tokens=tokens, checkpointing=True).kernel_sets
        )
        assert before is not None
        assert after is not None
        found[tokens] = before.peak / 1e9, after.peak / 1e9
    return found


def _plot(peaks: dict[int, tuple[float, float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(16, 9), dpi=120)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for number, colour, label in ((0, BEFORE, ORIGINAL), (1, AFTER, ALL)):
        values = [ends[number] for ends in peaks.values()]
        axes.plot(list(peaks), values, "o-", color=colour, linewidth=4, markersize=9, label=label)
        for tokens, value in zip(peaks, values):
            place = (0, 12 if number == 0 else -24)
            axes.annotate(f"{value:.3g}", (tokens, value), place, textcoords="offset points", ha="center", fontsize=13)
    axes.set_xticks(list(peaks), [f"{tokens:,}" for tokens in peaks], fontsize=13)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xlabel("tokens", fontsize=15)
    axes.set_ylabel("GB at the peak, beyond weights and their gradients", fontsize=15)
    axes.legend(fontsize=15, loc="upper left")
    axes.grid(alpha=0.3)
    axes.margins(y=0.1)
    figure.suptitle(f"{MODEL}: a training step with gradient checkpointing", fontsize=21, fontweight="bold")
    figure.text(0.99, 0.01, NOTE, ha="right", fontsize=13)
    figure.tight_layout(rect=(0, 0.03, 1, 0.97))
    figure.savefig(path)
    plt.close(figure)
