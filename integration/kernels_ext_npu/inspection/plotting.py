"""Draws launches and bytes by operator, before and after, to be shown on a slide.

An operator may launch a thousand times less often than another one, and both have to be seen: lengths are logarithmic,
and every bar has its figure beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib

matplotlib.use("agg")  # no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from kernels_ext_npu.inspection.counts import Counts
from kernels_ext_npu.inspection.inspecting import WHOLE, Inspection, Variant, whole

_SHOWN = 12
_SPAN = 1e5  # of the largest bar to the smallest one that is drawn to scale
_BEFORE, _AFTER = "#b0b7c3", "#c7000b"


def plot(inspection: Inspection, path: Path) -> None:
    """Write the picture of an inspection into a file, whose name says in which format."""
    figure = draw(inspection)
    figure.savefig(path)
    plt.close(figure)


def draw(inspection: Inspection) -> Figure:
    """Draw the training step, or the forward where a step was not counted, of the original and with all kernels.

    Where all phases of a whole step were counted it is that, and they are drawn above the operators.
    """
    before, after = (whole(variant) for variant in _ends(inspection))
    if before is not None and after is not None:
        figure = plt.figure(figsize=(16, 12), dpi=120)
        grid = figure.add_gridspec(2, 1, height_ratios=(1, 2))
        _phases(grid[0].subgridspec(1, 3).subplots(sharey=True, squeeze=False)[0], inspection)
        axes, what, by = grid[1].subgridspec(1, 2).subplots(squeeze=False)[0], "a whole training step", " by operator"
    else:
        phase = next(p for p in ("step", "forward") if all(v.counts[p] for v in _ends(inspection)))
        before, after = (variant.counts[phase] for variant in _ends(inspection))
        assert before is not None
        assert after is not None
        figure, axes = plt.subplots(1, 2, figsize=(16, 9), dpi=120)
        what, by = "a training step" if phase == "step" else "a forward", ""
    _bars(axes[0], f"launches{by}", before.launches, after.launches, 1)
    _bars(axes[1], f"GB that move{by}", before.bytes, after.bytes, 1e9)
    figure.suptitle(f"{inspection.subject.name}: {what}, {inspection.inputs}", fontsize=22, fontweight="bold")
    figure.text(
        0.99,
        0.01,
        "counted on fake tensors, not measured on hardware · kernels-ext-npu inspect",
        ha="right",
        fontsize=11,
    )
    figure.tight_layout(rect=(0, 0.03, 1, 0.97), w_pad=3)
    return figure


def plot_peaks(model: str, peaks: dict[int, tuple[float, float]], path: Path) -> None:
    """Write a picture of peak memory over tokens into a file.

    Args:
        model: its name.
        peaks: GB by tokens, of the original and with kernels.
        path: of the file, whose name says in which format.
    """
    figure, axes = plt.subplots(figsize=(16, 9), dpi=120)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for number, colour, label in ((0, _BEFORE, "original"), (1, _AFTER, "with kernels")):
        values = [ends[number] for ends in peaks.values()]
        axes.plot(list(peaks), values, "o-", color=colour, linewidth=4, markersize=9, label=label)
        for tokens, value in zip(peaks, values):
            place = (0, 12 if number == 0 else -24)
            axes.annotate(_number(value), (tokens, value), place, textcoords="offset points", ha="center", fontsize=13)
    axes.set_xticks(list(peaks), [f"{tokens:,}" for tokens in peaks], fontsize=13)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    axes.set_xlabel("tokens", fontsize=15)
    axes.set_ylabel("GB at the peak, beyond weights and their gradients", fontsize=15)
    axes.legend(fontsize=15, loc="upper left")
    axes.grid(alpha=0.3)
    axes.margins(y=0.1)
    figure.suptitle(f"{model}: a training step with gradient checkpointing", fontsize=22, fontweight="bold")
    note = "counted on fake tensors, not measured on hardware · kernels-ext-npu inspect"
    figure.text(0.99, 0.01, note, ha="right", fontsize=11)
    figure.tight_layout(rect=(0, 0.03, 1, 0.97))
    figure.savefig(path)
    plt.close(figure)


def _ends(inspection: Inspection) -> tuple[Variant, Variant]:
    return inspection.variants[0], inspection.variants[-1]


def _phases(panels: Iterable[Axes], inspection: Inspection) -> None:
    """Draw what each phase of a whole step launches, moves and holds, to scale."""
    sums: list[tuple[str, Callable[[Counts], float]]] = [
        ("launches", lambda counts: counts.launches.total()),
        ("GB that move", lambda counts: counts.bytes.total() / 1e9),
        ("peak GB beyond weights", lambda counts: counts.peak / 1e9),
    ]
    places = range(len(WHOLE), 0, -1)
    for axes, (title, of) in zip(panels, sums):
        for shift, variant, colour in zip((0.2, -0.2), _ends(inspection), (_BEFORE, _AFTER)):
            found = [0 if (counts := variant.counts[phase]) is None else of(counts) for phase in WHOLE]
            heights = [place + shift for place in places]
            axes.barh(heights, found, 0.4, color=colour)
            for height, value in zip(heights, found):
                axes.annotate(
                    _number(value), (value, height), (4, 0), textcoords="offset points", va="center", fontsize=11
                )
        axes.set_yticks(list(places), list(WHOLE.values()), fontsize=13)
        axes.set_title(title, fontsize=15)
        axes.margins(x=0.2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_major_locator(MaxNLocator(4))
        axes.tick_params(axis="x", labelsize=11)
        _plain(axes)


def _bars(axes: Axes, title: str, before: Counter[str], after: Counter[str], unit: float) -> None:
    both = Counter({name: max(before[name], after[name]) for name in before | after})
    names = [name for name, _ in both.most_common(_SHOWN)]
    places = range(len(names) + 1, 0, -1)
    lengths = [_lengths(counts, names, unit) for counts in (before, after)]
    seen = [length for some in lengths for length in some if length]
    edge = max(min(seen, default=1), max(seen, default=1) / _SPAN) / 2
    axes.set_xscale("log")
    for shift, found, counts, colour, label in (
        (0.2, lengths[0], before, _BEFORE, "original"),
        (-0.2, lengths[1], after, _AFTER, "with kernels"),
    ):
        ends = [max(length, edge * 1.5) if length else edge for length in found]
        heights = [place + shift for place in places]
        widths = [end - edge for end in ends]
        axes.barh(heights, widths, 0.4, edge, color=colour, label=f"{label}: {_number(counts.total() / unit)}")
        for height, end, length in zip(heights, ends, found):
            axes.annotate(_number(length), (end, height), (4, 0), textcoords="offset points", va="center", fontsize=11)
    axes.set_xlim(edge, max(seen, default=1) * 5)
    axes.set_yticks(list(places), [*(name.strip("_") for name in names), "all others"], fontsize=13)
    axes.set_title(title, fontsize=18, pad=40)
    axes.legend(fontsize=15, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=2, frameon=False)
    axes.set_xlabel("on a logarithmic scale", fontsize=12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=12)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.grid(axis="x", color="#e6e8ec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _lengths(counts: Counter[str], names: list[str], unit: float) -> list[float]:
    """Return the counts of some operators in a unit, and behind them that of all others together."""
    shown = [counts[name] for name in names]
    return [count / unit for count in (*shown, counts.total() - sum(shown))]


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value >= 0.01 else "< 0.01"
