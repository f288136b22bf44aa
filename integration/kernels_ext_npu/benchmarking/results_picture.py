"""Draws the results of a benchmark: what kernels and layers take in a training step, in parts of the original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kernels_ext_npu.benchmarking.measured_calls import Result
from kernels_ext_npu.benchmarking.options import KERNELS
from kernels_ext_npu.benchmarking.results_layout import NONE, TIME, comparisons

STYLE: Any = {"font.size": 15, "axes.titlesize": 18, "figure.titlesize": 20}


def draw(path: Path, results: list[Result], names: list[str], title: str) -> None:
    """Draw a panel a model: what each kernel and a layer take in a training step, in parts of the original.

    That is time on a card, otherwise the bytes that move, in the first dtype.
    """
    import matplotlib
    from matplotlib.figure import Figure

    figure_name = TIME if any(TIME in result.figures for result in results) else "bytes"
    panels = _panels(results, figure_name, names[0])
    columns = min(3, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(16, 9), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
        for axis, (model, bars) in zip(axes, panels.items()):
            _panel(axis, model, bars, names)
        for axis in axes[len(panels) :]:
            axis.axis("off")
        what = "Time" if figure_name == TIME else "Bytes moved"
        figure.suptitle(f"{what} in a training step, relative to {names[0]}: less is better\n{title}")
        if panels:
            handles, labels = axes[0].get_legend_handles_labels()
            missing = f"   {NONE}: no kernel, or refused"
            figure.legend(handles, [*labels[:-1], labels[-1] + missing], loc="outside lower center", ncols=len(names))
        figure.savefig(path, dpi=120)


def _panels(results: list[Result], figure: str, original: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return model -> kernel -> provider -> part of the original.

    A kernel is there with the one of its calls that takes most.
    """
    panels: dict[str, dict[str, dict[str, float]]] = {}
    largest: dict[tuple[str, str], float] = {}
    for comparison in comparisons(r for r in results if r.dtype == results[0].dtype):
        one = comparison.get(original)
        if one is None or figure not in one.figures or not one.phase.startswith("training") or one.direction != "both":
            continue
        key, value = (one.model, one.kernel), one.figures[figure]
        if value > largest.get(key, 0):
            largest[key] = value
            parts = {name: r.figures[figure] / value for name, r in comparison.items() if figure in r.figures}
            panels.setdefault(one.model, {})[one.kernel] = parts
    return panels


def _panel(axis: Any, model: str, bars: dict[str, dict[str, float]], names: list[str]) -> None:
    kernels = [kernel for kernel in KERNELS if kernel in bars]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [at + (i - (len(names) - 1) / 2) * width for at in range(len(kernels))]
        drawn = axis.bar(places, [bars[k].get(name, 0.0) for k in kernels], width, label=name, color=f"C{i}")
        labels = [f"{bars[k][name]:.2f}" if name in bars[k] else NONE for k in kernels]
        axis.bar_label(drawn, labels=labels, padding=2, fontsize=11)
    axis.set_xticks(range(len(kernels)), kernels)
    axis.set_title(model if len(model) <= 30 else f"…{model[-30:]}")
    axis.spines[["top", "right"]].set_visible(False)
