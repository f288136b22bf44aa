"""Draws launches and bytes by operator, before and after, to be shown on a slide."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from kernels_ext_npu.inspection.inspecting import Inspection

_SHOWN = 12
_BEFORE, _AFTER = "#b0b7c3", "#c7000b"


def plot(inspection: Inspection, path: Path) -> None:
    """The training step, or the forward where a step was not counted, of the original and with all kernels."""
    phase = next(p for p in ("step", "forward") if all(_ends(inspection, p)))
    before, after = _ends(inspection, phase)
    assert before is not None
    assert after is not None
    figure, axes = plt.subplots(1, 2, figsize=(16, 9), dpi=120)
    _bars(axes[0], "launches", before.launches, after.launches, 1)
    _bars(axes[1], "GB that move", before.bytes, after.bytes, 1e9)
    what = "a training step" if phase == "step" else "a forward"
    figure.suptitle(f"{inspection.subject.name}: {what}, {inspection.inputs}", fontsize=22, fontweight="bold")
    figure.text(
        0.99,
        0.01,
        "counted on fake tensors, not measured on hardware · kernels-ext-npu inspect",
        ha="right",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.03, 1, 0.97))
    figure.savefig(path)
    plt.close(figure)


def _ends(inspection: Inspection, phase: str):
    return inspection.variants[0].counts[phase], inspection.variants[-1].counts[phase]


def _bars(axes: Axes, title: str, before: Counter[str], after: Counter[str], unit: float) -> None:
    both = Counter({name: max(before[name], after[name]) for name in before | after})
    names = [name for name, _ in both.most_common(_SHOWN)]
    others = [sum(counts.values()) - sum(counts[name] for name in names) for counts in (before, after)]
    places = range(len(names) + 1, 0, -1)
    for shift, counts, rest, colour, label in (
        (0.2, before, others[0], _BEFORE, "original"),
        (-0.2, after, others[1], _AFTER, "with kernels"),
    ):
        widths = [value / unit for value in (*(counts[name] for name in names), rest)]
        total = _number(counts.total() / unit)
        bars = axes.barh([p + shift for p in places], widths, 0.4, color=colour, label=f"{label}: {total}")
        axes.bar_label(bars, [_number(width) for width in widths], padding=3, fontsize=11)
    axes.set_yticks(list(places), [*(name.strip("_") for name in names), "all others"], fontsize=13)
    axes.set_title(title, fontsize=18)
    axes.legend(fontsize=15, loc="lower right")
    axes.margins(x=0.12)
    axes.tick_params(axis="x", labelsize=12)
    axes.spines[["top", "right"]].set_visible(False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
