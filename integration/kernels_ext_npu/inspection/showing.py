"""Shows an inspection, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kernels_ext_npu.inspection import decoding, roofline, scalar_cores
from kernels_ext_npu.inspection.counts import Counts, Layer
from kernels_ext_npu.inspection.inspecting import PARTS, UPDATE, WHOLE, Inspection, Variant, whole
from kernels_ext_npu.inspection.mesh import ONE

_COUNTED = "Counted on fake tensors with torch_npu's meta kernels: nothing was computed, and nothing was timed."
_REPLAYED = (
    "replays: of a graph, in a step by generate(cache_implementation='static', compile_config=CompileConfig(backend="
    "'NPUGraph')), which launches a graph in the place of all of these; 0 where the step cannot be one."
)


def show(inspection: Inspection, console: Console) -> None:
    """Print an inspection: remarks, the report, and a table for each phase."""
    console.print(f"[bold]{inspection.subject.name}[/]: {_describe(inspection)}", highlight=False)
    for remark in inspection.remarks:
        console.print(f"- {remark}", highlight=False, markup=False)
    console.print(inspection.report)
    for phase, title in inspection.phases.items():
        if phase in PARTS:
            continue
        console.print(_table(inspection, phase, title))
        if inspection.mesh != ONE:
            console.print(_collectives(inspection, phase))
    if inspection.phases.keys() >= UPDATE.keys():
        console.print(_whole(inspection))
    console.print(_COUNTED, highlight=False)
    if decoding.STATIC in inspection.phases:
        console.print(_REPLAYED, highlight=False)
    alone = inspection.mesh == ONE
    console.print(
        f"peak: activations{'' if alone else ', and weights while they are gathered'}, beyond the weights "
        f"{'' if alone else 'of the rank '}({_gigabytes(inspection.weights)} GB) and their gradients.\n"
        f"estimate: the least time on {inspection.soc.name}, a roofline from published peak figures, which no chip "
        f"reaches{'' if alone else ', and without collectives'}.",
        highlight=False,
    )


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Return the whole inspection for JSON, with its counts by operator."""
    return {
        "model": inspection.subject.name,
        "class": inspection.subject.model_class.__name__,
        "inputs": inspection.inputs,
        "dtype": _dtype(inspection),
        "mesh": {"ranks": inspection.mesh.ranks} | asdict(inspection.mesh),
        "parameters": inspection.parameters,
        "weight_bytes": inspection.weights,
        "remarks": inspection.remarks,
        "modules": inspection.report.as_list(),
        "projections": inspection.report.projections_as_list(),
        "variants": [
            {"name": variant.name, "swapped": variant.swapped}
            | {phase: _fields(phase, counts) for phase, counts in variant.counts.items()}
            | ({"whole_step": _fields("whole_step", whole(variant))} if "optimizer" in variant.counts else {})
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
        f"{_dtype(inspection)}, {inspection.inputs}" + (f", {inspection.mesh}" if inspection.mesh != ONE else "")
    )


def _table(inspection: Inspection, phase: str, title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    decodes = phase in decoding.PHASES
    for heading in ("launches", "GB moved", "host waits", "peak GB", "estimate ms", *["replays"] * decodes):
        table.add_column(heading, justify="right", no_wrap=True)
    for variant in inspection.variants:
        counts = variant.counts[phase]
        replays = [str(decoding.replays(phase, counts))] if decodes and counts is not None else []
        table.add_row(variant.name, *_cells(counts), *replays)
    table.add_section()
    table.add_row("of the original", *_ratios(inspection.variants, phase), style="bold")
    for title, *pair in _layers(inspection, phase):
        table.add_section()
        table.add_row(title)
        for variant, counts in zip(_ends(inspection), pair):
            table.add_row(f"  {variant.name}", *_cells(counts))
    table.caption, table.caption_justify = _on_scalar_cores(inspection, phase), "left"
    return table


def _whole(inspection: Inspection) -> Table:
    """Make a table of the phases of a whole step, and of all of them."""
    table = Table(
        box=box.SIMPLE_HEAD, title="a whole step", title_justify="left", title_style="bold", padding=(0, 1, 0, 0)
    )
    table.add_column(no_wrap=True)
    for heading in ("launches", "GB moved", "host waits", "peak GB", "estimate ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    ends = _ends(inspection)
    for phase, title in WHOLE.items():
        cells = zip(*(_cells(variant.counts[phase]) for variant in ends))
        table.add_row(title, *(_stacked(*pair) for pair in cells))
    table.add_section()
    table.add_row(
        "all", *(_stacked(*pair) for pair in zip(*(_cells(whole(variant)) for variant in ends))), style="bold"
    )
    table.caption = "original → with kernels. What an optimizer keeps for each weight is no part of a peak."
    table.caption_justify = "left"
    return table


def _on_scalar_cores(inspection: Inspection, phase: str) -> str | None:
    """Say which launches are far longer than what is estimated for them."""
    said = [
        f"{variant.name}: {number:,} {name}"
        for variant in inspection.variants
        if (counts := variant.counts[phase]) is not None
        for name, number in scalar_cores.launches(counts).items()
    ]
    return (
        f"On the AI CPU, a few scalar cores, for which the estimate is far too low: {', '.join(said)}."
        if said
        else None
    )


def _collectives(inspection: Inspection, phase: str) -> Table:
    """Make a table of what ranks send each other; it has two figures where the kernels change one."""
    table = Table(box=box.SIMPLE_HEAD, title="collectives", title_justify="left", padding=(0, 1, 0, 0))
    table.add_column(overflow="fold")
    for heading in ("ranks", "calls", "GB"):
        table.add_column(heading, justify="right", no_wrap=True)
    before, after = (variant.counts[phase] for variant in _ends(inspection))
    if before is None or after is None:
        table.add_row("not counted")
        return table
    for title, one, other in [("", before, after), *_layers(inspection, phase)]:
        if title and (+one.calls or +other.calls):
            table.add_section()
            table.add_row(title)
        for key in dict.fromkeys([*one.calls, *other.calls]):
            if one.calls[key] or other.calls[key]:
                calls = _both(f"{one.calls[key]:,}", f"{other.calls[key]:,}")
                size = _both(*(_gigabytes(counts.messages[key]) for counts in (one, other)))
                table.add_row(f"{'  ' * bool(title)}{key.operator}", f"{key.ranks} ({key.axis})", calls, size)
    table.caption = "The kernels change no collective." if _same(before, after) else "original → with kernels"
    table.caption_justify = "left"
    return table


def _same(before: Counts, after: Counts) -> bool:
    return before.calls == after.calls and before.messages == after.messages


def _stacked(before: str, after: str) -> str:
    return before if before == after else f"{before}\n→ {after}"


def _both(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _ends(inspection: Inspection) -> tuple[Variant, Variant]:
    return inspection.variants[0], inspection.variants[-1]


def _layers(inspection: Inspection, phase: str) -> Iterator[tuple[str, Counts, Counts]]:
    """Give what one layer of each kind costs, without kernels and with them."""
    before, after = (variant.counts[phase] for variant in _ends(inspection))
    if before is not None and after is not None:
        for one, other in zip(before.layers, after.layers):
            yield f"each of {one.number}\n{one.name}", one.counts, other.counts


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


def _fields(phase: str, counts: Counts | None) -> dict[str, Any] | None:
    if counts is None:
        return None
    replays = {"graph_replays": decoding.replays(phase, counts)} if phase in decoding.PHASES else {}
    return (
        _sums(counts)
        | replays
        | {
            "operators": {
                name: {"launches": count, "bytes": counts.bytes[name], "estimate_seconds": counts.seconds[name]}
                for name, count in counts.launches.most_common()
                if count
            },
            "layers": [_layer(layer) for layer in counts.layers],
        }
    )


def _layer(layer: Layer) -> dict[str, Any]:
    return {"class": layer.name, "number": layer.number, "weight_bytes": layer.weights} | _sums(layer.counts)


def _sums(counts: Counts) -> dict[str, Any]:
    return {
        "launches": counts.launches.total(),
        "bytes": counts.bytes.total(),
        "host_waits": counts.waits,
        "ai_cpu_launches": scalar_cores.launches(counts),
        "peak_activation_bytes": counts.peak,
        "estimate_seconds": sum(counts.seconds.values()),
        "collectives": [
            key._asdict() | {"calls": calls, "bytes": counts.messages[key]}
            for key, calls in counts.calls.items()
            if calls
        ],
    }


def _dtype(inspection: Inspection) -> str:
    return str(inspection.dtype).removeprefix("torch.")


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f}" if size < 1e11 else f"{size / 1e9:,.0f}"
