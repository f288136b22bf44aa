"""Draws what kernels change for a model, to be shown on a slide or in a README: first the result, then the operators.

All axes are linear and begin at zero, so that lengths can be compared; every bar has its figure beside it, since an
operator may launch a thousand times less often than another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.inspecting import ALL, ORIGINAL, UPDATE, Inspection, whole

_SHOWN = 9  # operators
BEFORE, AFTER = "#b0b7c3", "#c7000b"
_WORTH_SAYING = 1.05  # the least factor that is told
_LONG, _LONGEST = 26, 50  # letters of an operator that is written on two lines, and of a model's name or path
_SMALL, _MEDIUM, _LARGE = 13, 15, 21
NOTE = "counted on fake tensors, not measured on hardware · kernels-ext-npu inspect"
_MEASURES: tuple[tuple[str, str, Callable[[Counts], float]], ...] = (  # what it is, how less of it is called
    ("launches", "fewer launches", lambda counts: counts.launches.total()),
    ("GB moved", "fewer bytes moved", lambda counts: counts.bytes.total() / 1e9),
    ("peak GB beyond weights", "less memory at the peak", lambda counts: counts.peak / 1e9),
    ("estimated ms", "less time", lambda counts: 1e3 * counts.estimate.seconds),
)


def plot(inspection: Inspection, path: Path) -> None:
    """Write the picture of an inspection into a file, whose name says in which format."""
    figure = draw(inspection)
    figure.savefig(path)
    plt.close(figure)


def draw(inspection: Inspection) -> Figure:
    """Draw the training step, or the forward where a step was not counted, of the original and with all kernels.

    Where a whole step was counted, what clipping and the optimizer cost is drawn beside it.
    """
    phase = next(p for p in ("step", "forward") if all(kernel_set.counts[p] for kernel_set in inspection.ends))
    before, after = pair = tuple(
        counts for kernel_set in inspection.ends if (counts := kernel_set.counts[phase]) is not None
    )
    work = "a training step" if phase == "step" else "a forward"
    rows = [("forward and\nbackward" if phase == "step" else "forward", pair)]
    one, other = (whole(kernel_set, UPDATE) for kernel_set in inspection.ends)  # what follows a backward
    if one is not None and other is not None:
        rows.append(("clipping and\noptimizer", (one, other)))
    layout = ConstrainedLayoutEngine(rect=(0.01, 0.04, 0.98, 0.78), h_pad=0.15, w_pad=0.15)
    figure = plt.figure(figsize=(16, 9), dpi=120, layout=layout)
    grid = figure.add_gridspec(2, 1, height_ratios=(1, 2))
    panels: Any = grid[0].subgridspec(1, len(_MEASURES)).subplots(sharey=True)
    for axes, (title, _, measure) in zip(panels, _MEASURES):
        _draw_pairs(axes, [(label, measure(one), measure(other)) for label, (one, other) in rows])
        axes.set_title(title, fontsize=_MEDIUM, fontweight="bold")
    operators: Any = grid[1].subgridspec(1, 2).subplots()
    _draw_operators(operators[0], "launches", before.launches, after.launches, 1)
    _draw_operators(operators[1], "GB moved", before.bytes, after.bytes, 1e9)
    figure.text(0.02, 0.955, f"{inspection.subject.name[-_LONGEST:]}, {work} with kernels:", fontsize=_LARGE)
    figure.text(0.02, 0.91, result(before, after), fontsize=_LARGE, fontweight="bold", color=AFTER)
    figure.text(0.02, 0.89, _said(inspection, pair, other if len(rows) > 1 else None), fontsize=_SMALL, va="top")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (BEFORE, AFTER)]
    figure.legend(handles, [ORIGINAL, ALL], loc="upper right", fontsize=_MEDIUM, ncols=2, frameon=False)
    figure.text(0.99, 0.01, NOTE, ha="right", fontsize=_SMALL)
    return figure


def result(before: Counts, after: Counts) -> str:
    """Say in words what kernels change, such as "15 × fewer launches, 2.0 × fewer bytes moved"."""
    said = []
    for _, less, measure in _MEASURES[:3]:
        one, other = measure(before), measure(after)
        factor = one / other if other else 1.0
        if factor >= _WORTH_SAYING:
            said.append(f"{_factor(factor)} × {less}")
        elif 0 < factor <= 1 / _WORTH_SAYING:
            more = less.replace("fewer", "more").replace("less", "more")
            said.append(f"{_factor(1 / factor)} × {more}")
    return ", ".join(said) or "nothing changes"


def _said(inspection: Inspection, pair: Sequence[Counts], update: Counts | None) -> str:
    """Say what was counted, how often the host waits, and what the optimizer adds."""
    waits = " → ".join(str(counts.waits) for counts in pair)
    said = f"{inspection.inputs} in {inspection.dtype}. The host waits {waits} times."
    if update is not None:
        launches, moved, peak = (_number(measure(update)) for _, _, measure in _MEASURES[:3])
        said += (
            f"\nClipping and AdamW, in lists, add {launches} launches and {moved} GB moved to both, and hold {peak} GB "
            "in lists of their own, once all activations are gone."
        )
    return said


def _draw_pairs(axes: Axes, rows: Sequence[tuple[str, float, float]], in_one: bool = False) -> None:
    """Draw two bars for each row, the first row on top, each with its figure, or both with one that has an arrow."""
    longest = max((value for _, *pair in rows for value in pair), default=0) or 1
    for place, (_, *pair) in zip(range(len(rows), 0, -1), rows):
        for shift, value, colour in zip((0.2, -0.2), pair, (BEFORE, AFTER)):
            bar = axes.barh(place + shift, value, 0.4, color=colour)
            if not in_one:
                axes.bar_label(bar, [_number(value)], padding=5, fontsize=_SMALL)
        if in_one:
            said, end = " → ".join(map(_number, pair)), (max(pair), place)
            axes.annotate(said, end, (5, 0), textcoords="offset points", va="center", fontsize=_SMALL)
    axes.set_xlim(0, (1.5 if in_one else 1.35) * longest)
    axes.set_yticks(range(len(rows), 0, -1), [row[0] for row in rows], fontsize=_SMALL)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_major_locator(MaxNLocator(3))
    axes.tick_params(axis="x", labelsize=_SMALL)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e6e8ec")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_operators(axes: Axes, what: str, before: Counter[str], after: Counter[str], scale: float) -> None:
    """Draw what the operators that count most do before and after, and all others together."""
    most = Counter({name: max(before[name], after[name]) for name in before | after}).most_common(_SHOWN)
    rows = [(_folded(name.strip("_")), before[name] / scale, after[name] / scale) for name, _ in most]
    rest = [(counts.total() - sum(counts[name] for name, _ in most)) / scale for counts in (before, after)]
    _draw_pairs(axes, [*rows, ("all others", rest[0], rest[1])], in_one=True)
    axes.set_title(f"{what} by operator", fontsize=_MEDIUM, fontweight="bold")


def _folded(name: str) -> str:
    """Write a long name on two lines, the second one from the _ that is nearest to its middle."""
    places = [place for place, letter in enumerate(name) if letter == "_"]
    if len(name) < _LONG or not places:
        return name
    middle = min(places, key=lambda place: abs(place - len(name) // 2))
    return f"{name[:middle]}\n{name[middle:]}"


def _factor(value: float) -> str:
    return f"{value:.0f}" if value >= 9.95 else f"{value:.1f}"


def _number(value: float) -> str:
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 1 else f"{value:.2f}" if value >= 0.01 else "< 0.01"
