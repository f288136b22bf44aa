"""An inspection as tables and as JSON."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kernels_ext_npu.inspection import roofline
from kernels_ext_npu.inspection.counting import Counts
from kernels_ext_npu.inspection.inspecting import PHASES, Inspection, Variant

_COUNTED = "Counted on fake tensors with torch_npu's meta kernels: nothing was computed, and nothing was timed."


def show(inspection: Inspection, console: Console) -> None:
    """Print what was found."""
    console.print(f"[bold]{inspection.subject.name}[/]: {_describe(inspection)}", highlight=False)
    for remark in inspection.remarks:
        console.print(f"- {remark}", highlight=False, markup=False)
    console.print(inspection.report)
    for phase, title in PHASES.items():
        console.print(_table(inspection, phase, title))
    console.print(_COUNTED, highlight=False)
    console.print(
        f"peak: activations, beyond weights ({_gigabytes(inspection.weights)} GB) and their gradients.\n"
        f"estimate: the least time on {inspection.soc.name}, a roofline from published peak figures, which no chip "
        "reaches.",
        highlight=False,
    )


def as_json(inspection: Inspection) -> dict[str, Any]:
    """All of it, by operator."""
    return {
        "model": inspection.subject.name,
        "class": inspection.subject.model_class.__name__,
        "inputs": inspection.inputs,
        "dtype": _dtype(inspection),
        "parameters": inspection.parameters,
        "weight_bytes": inspection.weights,
        "remarks": inspection.remarks,
        "modules": inspection.report.as_list(),
        "variants": [
            {"name": variant.name, "swapped": variant.swapped}
            | {phase: _fields(counts) for phase, counts in variant.counts.items()}
            for variant in inspection.variants
        ],
        "estimate": {
            "what": "a roofline: the least time from published peak figures, not a measurement",
            "soc": inspection.soc.name,
            "profile": inspection.soc.profile,
            "source": roofline.SOURCE,
        },
    }


def _describe(inspection: Inspection) -> str:
    return (
        f"{inspection.subject.model_class.__name__}, {inspection.parameters / 1e9:.2f} billion parameters in "
        f"{_dtype(inspection)}, {inspection.inputs}"
    )


def _table(inspection: Inspection, phase: str, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    for heading in ("launches", "GB moved", "host waits", "peak GB", "estimate ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for variant in inspection.variants:
        table.add_row(variant.name, *_cells(variant.counts[phase]))
    table.add_section()
    table.add_row("of the original", *_ratios(inspection.variants, phase), style="bold")
    return table


def _cells(counts: Counts | None) -> list[str]:
    if counts is None:
        return ["not counted", *[""] * 4]
    return [
        f"{counts.launches.total():,}",
        _gigabytes(counts.bytes.total()),
        str(counts.waits),
        _gigabytes(counts.peak),
        f"{1e3 * sum(counts.seconds.values()):,.1f}",
    ]


def _ratios(variants: list[Variant], phase: str) -> list[str]:
    before, after = variants[0].counts[phase], variants[-1].counts[phase]
    if before is None or after is None:
        return [""] * 5
    pairs = [
        (after.launches.total(), before.launches.total()),
        (after.bytes.total(), before.bytes.total()),
        (after.waits, before.waits),
        (after.peak, before.peak),
        (sum(after.seconds.values()), sum(before.seconds.values())),
    ]
    return [f"{mine / other:.2f}" if other else "" for mine, other in pairs]


def _fields(counts: Counts | None) -> dict[str, Any] | None:
    if counts is None:
        return None
    return {
        "launches": counts.launches.total(),
        "bytes": counts.bytes.total(),
        "host_waits": counts.waits,
        "peak_activation_bytes": counts.peak,
        "estimate_seconds": sum(counts.seconds.values()),
        "operators": {
            name: {"launches": count, "bytes": counts.bytes[name], "estimate_seconds": counts.seconds[name]}
            for name, count in counts.launches.most_common()
            if count
        },
    }


def _dtype(inspection: Inspection) -> str:
    return str(inspection.dtype).removeprefix("torch.")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f}" if size < 1e11 else f"{size / 1e9:,.0f}"
