"""The report of a benchmark on a card: JSON that can be attached to an issue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kernels_ext_npu.benchmarking.run import Result
from kernels_ext_npu.benchmarking.showing import comparisons
from kernels_ext_npu.selftest import machine
from kernels_ext_npu.selftest.report import clean

FORMAT = 1  # of the JSON
FACTS = ("distance", "refused")  # of a result, beside its figures


def head(llama_factory: str, note: str, tolerance: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return what stands before the results: what a selftest says of the machine, and how was measured.

    Args:
        llama_factory: its version, or why it has no column.
        note: how times are measured.
        tolerance: when a result agrees with the original.
        sizes: of a run and of its models, by name.
    """
    described = {"machine": machine.describe() | {"LLaMA-Factory": llama_factory}, "method": note}
    return {"format": FORMAT} | described | {"tolerance": tolerance} | sizes


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
    """Return JSON, a call a line, with nothing that tells whose machine it was: no path, name, token or address."""
    written = ",\n".join(f"  {json.dumps(line)}" for line in clean(lines(results)))
    return f'{json.dumps(clean(head), indent=1)[:-2]},\n "results": [\n{written}\n ]\n}}\n'
