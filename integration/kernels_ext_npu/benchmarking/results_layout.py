"""Lays out the results of a benchmark: as a table, and as the lines of a report to attach to an issue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kernels_ext_npu.benchmarking.measured_calls import Result

# column -> the figure without which there is none, and how it is written
COLUMNS: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "median ms": ("median_ms", lambda found: f"{found['median_ms']:.3f}"),
    "quartiles": ("median_ms", lambda found: f"{found['lower_quartile_ms']:.3f}–{found['upper_quartile_ms']:.3f}"),
    "launches": ("launches", lambda found: f"{found['launches']}"),
    "kernels": ("kernels", lambda found: f"{found['kernels']}"),
    "MB moved": ("bytes", lambda found: f"{found['bytes'] / 1e6:.2f}"),
    "peak MB": ("peak_memory_bytes", lambda found: f"{found['peak_memory_bytes'] / 1e6:.2f}"),
    "waits": ("host_waits", lambda found: f"{found['host_waits']}"),
}
NONE = "–"

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

    Calls stand as they were run, and providers side by side in each column, in the order of the names.
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
    phase = None
    for comparison in comparisons(results):
        one = next(iter(comparison.values()))
        if one.phase != phase:
            phase = one.phase
            table.add_section()
            table.add_row(Text(phase, style="bold"))
        cells = [" / ".join(_cell(comparison.get(name), *column) for name in names) for column in columns.values()]
        shape = "×".join(map(str, one.shapes[0])) if one.shapes else ""
        table.add_row(Text(f"  {one.name} {shape}"), one.direction, *cells)
    console.print(table)
    for line in _refusals(results):
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
    console.print()


def _cell(result: Result | None, figure: str, write: Callable[[dict[str, Any]], str]) -> str:
    return write(result.figures) if result and figure in result.figures else NONE


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
            facts = {"distance": result.distance, "refused": result.refused}
            line[name] = {fact: value for fact, value in facts.items() if value is not None} | result.figures
        found.append(line)
    return found
