"""Lays out the results of a benchmark: as a table, the lines of a report to attach to an issue, and a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernels_ext_npu.benchmarking.measured_calls import Result
from kernels_ext_npu.benchmarking.options import KERNELS
from kernels_ext_npu.machine.privacy import report_text

TIME = "median_ms"
# column -> the figure, what it is divided by, and its format
COLUMNS = {
    "median ms": (TIME, 1, "{:.3f}"),
    "launches": ("launches", 1, "{:.0f}"),
    "MB moved": ("bytes", 1e6, "{:.2f}"),
    "peak MB": ("peak_memory_bytes", 1e6, "{:.2f}"),
    "waits": ("host_waits", 1, "{:.0f}"),
}
NONE = "–"
FORMAT = 1  # of the JSON of a report
FACTS = ("distance", "refused")  # of a result, beside its figures
STYLE: Any = {"font.size": 15, "axes.titlesize": 18, "figure.titlesize": 20}  # of the picture

Comparison = dict[str, Result]  # by provider


def comparisons(results: Iterable[Result]) -> list[Comparison]:
    """Group the results of one call in one direction, by all who compute it.

    Who was refused is in every direction.
    """
    found: dict[tuple, Comparison] = {}
    refused: list[Result] = []
    for result in results:
        if result.refused is not None:
            refused.append(result)
        found.setdefault((*_call(result), result.direction), {})[result.provider] = result
    for result in refused:
        for key, comparison in found.items():
            if key[:-1] == _call(result):
                comparison.setdefault(result.provider, result)
    return list(found.values())


def _call(result: Result) -> tuple:
    return result.model, result.dtype, result.phase, result.path, str(result.shapes)


def show(console: Console, results: list[Result], names: list[str]) -> None:
    """Print a table of one model in one dtype.

    Providers stand side by side in each column, in the order of the names.
    """
    first = results[0]
    title = f"{first.model}, {first.dtype}: {' / '.join(names)}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("call", overflow="fold")
    table.add_column("direction")
    columns = {name: c for name, c in COLUMNS.items() if any(c[0] in result.figures for result in results)}
    for name in columns:
        table.add_column(name, justify="right")
        if name == "median ms":
            table.add_column("quartiles", justify="right")
    phase = None
    for comparison in sorted(comparisons(results), key=_order):
        one = next(iter(comparison.values()))
        if one.phase != phase:
            phase = one.phase
            table.add_section()
            table.add_row(Text(phase, style="bold"))
        cells = []
        for name, column in columns.items():
            cells.append(" / ".join(_cell(comparison.get(n), *column) for n in names))
            if name == "median ms":
                cells.append(" / ".join(_quartiles(comparison.get(n)) for n in names))
        shape = "×".join(map(str, one.shapes[0])) if one.shapes else ""
        table.add_row(Text(f"  {one.name} {shape}"), one.direction, *cells)
    console.print(table)
    for line in _refusals(results):
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    console.print()


def _order(comparison: Comparison) -> tuple:
    """Return what sorts the rows of a table.

    Phases stand as they were run, in them kernels, then layers, and a call's directions in a row.
    """
    one = next(iter(comparison.values()))
    phases = ("prefill", "decode", "training")
    directions = ("forward", "backward", "both")
    phase = phases.index(one.phase.split(",")[0])
    return phase, KERNELS.index(one.kernel), one.path, str(one.shapes), directions.index(one.direction)


def _cell(result: Result | None, figure: str, unit: float, form: str) -> str:
    return form.format(result.figures[figure] / unit) if result and figure in result.figures else NONE


def _quartiles(result: Result | None) -> str:
    if result is None or TIME not in result.figures:
        return NONE
    return f"{result.figures['lower_quartile_ms']:.3f}–{result.figures['upper_quartile_ms']:.3f}"


def _refusals(results: list[Result]) -> list[str]:
    """Write a line a provider, class and reason, with the phases that it is true of."""
    phases: dict[tuple[str, str, str], list[str]] = {}
    for result in results:
        if result.refused is not None:
            found = phases.setdefault((result.provider, result.name, result.refused), [])
            found.append(result.phase.split(",")[0])
    return [
        f"{NONE} {provider}, {name}, {', '.join(dict.fromkeys(found))}: {reason}"
        for (provider, name, reason), found in phases.items()
    ]


def report_lines(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Return a line for each call in each direction, with the figures of everybody who computed it."""
    found = []
    for comparison in comparisons(results):
        one = next(iter(comparison.values()))
        line: dict[str, Any] = {
            "of": one.model,
            "what": f"{one.kernel}, {one.phase.partition(',')[0]}, {one.direction}",
            "dtype": one.dtype,
            "call": one.name,
            "module": one.path,
            "shapes": one.shapes,
            "phase": one.phase,
        }
        for name, result in comparison.items():
            line[name] = {fact: value for fact in FACTS if (value := getattr(result, fact)) is not None}
            line[name] |= result.figures
        found.append(line)
    return found


def report(head: dict[str, Any], results: Iterable[Result]) -> str:
    """Return JSON, a call a line, with nothing that tells whose machine it was: no path, name, token or address.

    Args:
        head: what a selftest says of the machine, and how was measured; ``format`` is added.
    """
    return report_text({"format": FORMAT} | head, report_lines(results))


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
