"""The report of a benchmark on a card: JSON that can be attached to an issue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kernels_ext_npu.benchmarking.comparison import Result
from kernels_ext_npu.benchmarking.results_table import comparisons
from kernels_ext_npu.machine.privacy import report_text

FORMAT = 1  # of the JSON
FACTS = ("distance", "refused")  # of a result, beside its figures


def lines(results: Iterable[Result]) -> list[dict[str, Any]]:
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


def to_text(head: dict[str, Any], results: Iterable[Result]) -> str:
    """Return JSON, a call a line, with nothing that tells whose machine it was: no path, name, token or address.

    Args:
        head: what a selftest says of the machine, and how was measured; ``format`` is added.
    """
    return report_text({"format": FORMAT} | head, lines(results))
