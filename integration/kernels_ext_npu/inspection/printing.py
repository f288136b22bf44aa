"""Prints an inspection: as tables, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.phases import DECODING, STATIC, replays
from kernels_ext_npu.inspection.inspecting import UPDATE, WHOLE, Inspection, KernelSet, whole
from kernels_ext_npu.inspection.mesh import ONE
from kernels_ext_npu.measuring import links, roofline
from kernels_ext_npu.measuring.estimate import SPREAD

_COUNTED = "Counted on fake tensors with torch_npu's meta kernels: nothing was computed, and nothing was timed."
_LAUNCHED = (
    "launches: calls of operators by the host; kernels: what they are on the device; GB moved: what these read and "
    "write, casts and copies inside operators among them (docs/inside.md)."
)
_REPLAYED = (
    "replays: of a graph, in a step by generate(cache_implementation='static', compile_config=CompileConfig(backend="
    "'NPUGraph')), which launches a graph in the place of all of these; 0 where the step cannot be one."
)
_HEADINGS = ("launches", "kernels", "GB moved", "host waits", "peak GB", "estimate ms", "roofline ms")
_NARROW = 96  # columns; below them headings take two lines


def show(inspection: Inspection, console: Console) -> None:
    """Print an inspection: remarks, the report, and a table for each phase."""
    ranks = "" if inspection.mesh == ONE else f", {inspection.mesh}"
    console.print(
        f"[bold]{inspection.subject.name}[/]: {inspection.subject.model_class.__name__}, "
        f"{inspection.parameters / 1e9:.2f} billion parameters in {inspection.dtype}, {inspection.inputs}{ranks}",
        highlight=False,
    )
    for remark in inspection.remarks:
        console.print(f"- {remark}", highlight=False, markup=False)
    console.print(inspection.report)
    narrow = console.width < _NARROW
    for phase, title in inspection.phases.items():
        if phase in WHOLE and phase not in UPDATE:
            continue
        console.print(_table(inspection, phase, title, narrow))
        if inspection.mesh != ONE:
            console.print(_collectives(inspection, phase))
    if inspection.phases.keys() >= UPDATE.keys():
        console.print(_whole(inspection, narrow))
    console.print(_COUNTED, highlight=False)
    console.print(_LAUNCHED, highlight=False)
    if STATIC in inspection.phases:
        console.print(_REPLAYED, highlight=False)
    alone = inspection.mesh == ONE
    console.print(
        f"peak: activations and workspaces{'' if alone else ', and weights while they are gathered'}, beyond the "
        f"weights {'' if alone else 'of the rank '}({_gigabytes(inspection.weights)} GB) and their gradients.\n"
        f"estimate: on {inspection.soc.name} ({inspection.soc.profile} in MindStudio Modeling), in eager mode and "
        "without waits of the host, fitted to what others measured on a 910B2; its range is a factor of "
        f"{SPREAD}, within which nine of ten of their figures are that were not fitted (docs/estimates.md)"
        f"{'' if alone else '; with collectives, those of FSDP2 only where they take longer than the kernels'}.\n"
        f"roofline: all kernels at the chip's peaks{'' if alone else ', without collectives'}; of "
        "products: in proportion to that of products and attention alone, the original's or the kernels', whichever is "
        "smaller.",
        highlight=False,
    )


def as_json(inspection: Inspection) -> dict[str, Any]:
    """Return the whole inspection for JSON, with its counts by operator."""
    return {
        "model": inspection.subject.name,
        "class": inspection.subject.model_class.__name__,
        "inputs": inspection.inputs,
        "dtype": inspection.dtype,
        "mesh": {"ranks": inspection.mesh.ranks} | asdict(inspection.mesh),
        "parameters": inspection.parameters,
        "weight_bytes": inspection.weights,
        "remarks": inspection.remarks,
        "modules": inspection.report.as_list(),
        "projections": inspection.report.projections_as_list(),
        "variants": [_kernel_set_as_json(inspection, kernel_set) for kernel_set in inspection.kernel_sets],
        "estimate": {
            "what": "estimate: the longer of device and host, fitted to what others measured on a 910B2; roofline: the "
            "time at published peaks; neither is a measurement",
            "range": f"nine of ten figures that were not fitted are within a factor of {SPREAD}",
            "of_products": "the roofline in proportion to products and attention, of the original or with kernels",
            "chip": inspection.soc.name,
            "profile": inspection.soc.profile,
            "source": roofline.SOURCE,
            "links": links.SOURCE,
        },
    }


def _kernel_set_as_json(inspection: Inspection, kernel_set: KernelSet) -> dict[str, Any]:
    counted = kernel_set.counts | ({"whole_step": whole(kernel_set)} if "optimizer" in kernel_set.counts else {})
    phases: dict[str, Any] = {}
    for phase, counts in counted.items():
        if counts is None:
            phases[phase] = None
            continue
        layers = [
            {"class": layer.name, "number": layer.number, "weight_bytes": layer.weights} | _sums(layer.counts)
            for layer in counts.layers
        ]
        operators = {
            name: {
                "launches": count,
                "kernels": counts.kernels[name],
                "bytes": counts.bytes[name],
                "flops": counts.flops[name],
                "roofline_seconds": counts.seconds[name],
            }
            for name, count in counts.launches.most_common()
            if count
        }
        ratio = {"estimate_of_products": inspection.product_ratio(phase, counts)}
        graphs = {"graph_replays": replays(phase, counts)} if phase in DECODING else {}
        phases[phase] = _sums(counts) | ratio | graphs | {"operators": operators, "layers": layers}
    return {"name": kernel_set.name, "swapped": kernel_set.swapped} | phases


def _sums(counts: Counts) -> dict[str, Any]:
    return {
        "launches": counts.launches.total(),
        "kernels": counts.kernels.total(),
        "bytes": counts.bytes.total(),
        "bytes_not_read": counts.not_read.total(),
        "flops": sum(counts.flops.values()),
        "host_waits": counts.waits,
        "ai_cpu_launches": {name: number for name, number in counts.on_ai_cpu.items() if number},
        "peak_activation_bytes": counts.peak,
        "estimate_seconds": counts.estimate.seconds,
        "device_seconds": counts.estimate.device,
        "collective_seconds": counts.estimate.collectives,
        "graph_seconds": counts.estimate.graph,
        "host_seconds": counts.estimate.host,
        "roofline_seconds": counts.roofline,
        "products_seconds": counts.products,
        "collectives": [
            key._asdict() | {"calls": calls, "bytes": counts.messages[key]}
            for key, calls in counts.calls.items()
            if calls
        ],
    }


def _new_table(title: str, headings: tuple[str, ...], narrow: bool = False, **style: Any) -> Table:
    """Make a table of figures, each row with a label."""
    style |= {"padding": (0, 0), "show_edge": False} if narrow else {"padding": (0, 1, 0, 0)}
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", **style)
    table.caption_justify = "left"
    table.add_column(overflow="fold")
    for heading in headings:
        table.add_column(heading.replace(" ", "\n") if narrow else heading, justify="right", no_wrap=True)
    return table


def _table(inspection: Inspection, phase: str, title: str, narrow: bool) -> Table:
    """Make a table of a phase: the variants, their proportions, and a layer of each kind."""
    decodes = phase in DECODING
    table = _new_table(title, (*_HEADINGS, *["replays"] * decodes), narrow, title_style="bold")
    for kernel_set in inspection.kernel_sets:
        counts = kernel_set.counts[phase]
        graphs = [str(replays(phase, counts))] if decodes and counts is not None else []
        table.add_row(kernel_set.name, *_cells(counts), *graphs)
    before, after = (kernel_set.counts[phase] for kernel_set in inspection.ends)
    table.add_section()
    if before is not None and after is not None:
        ratios = [f"{mine / other:.2f}" if other else "" for mine, other in zip(_figures(after), _figures(before))]
        table.add_row("of the original", *ratios, style="bold")
        if (ratio := inspection.product_ratio(phase, after)) is not None:
            table.add_row("of products", *[""] * (len(_HEADINGS) - 1), f"{ratio:.2f}", style="bold")
    for title, *pair in _layers(before, after):
        table.add_section()
        table.add_row(title)
        for kernel_set, counts in zip(inspection.ends, pair):
            table.add_row(f"  {kernel_set.name}", *_cells(counts))
    table.caption = "\n".join(filter(None, (_times(inspection, phase), _on_ai_cpu(inspection, phase)))) or None
    return table


def _whole(inspection: Inspection, narrow: bool) -> Table:
    """Make a table of the phases of a whole step, and of all of them."""
    table = _new_table("a whole step", _HEADINGS, narrow, title_style="bold")
    counted = {title: [kernel_set.counts[phase] for kernel_set in inspection.ends] for phase, title in WHOLE.items()}
    for title, pair in (counted | {"all": [whole(kernel_set) for kernel_set in inspection.ends]}).items():
        if title == "all":
            table.add_section()
        cells = zip(*map(_cells, pair))
        table.add_row(
            title, *(_both(one, other, "\n→ ") for one, other in cells), style="bold" if title == "all" else ""
        )
    table.caption = "original → with kernels. What an optimizer keeps for each weight is no part of a peak."
    return table


def _times(inspection: Inspection, phase: str) -> str:
    """Say in which range the estimates of the ends are, and who decides: the host or the device."""
    said = []
    for kernel_set in inspection.ends:
        counts = kernel_set.counts[phase]
        if counts is None:
            continue
        found = counts.estimate
        low, high = (f"{1e3 * seconds:,.1f}" for seconds in found.range)
        graph = f"; in a graph {1e3 * found.graph:,.1f}" if replays(phase, counts) else ""
        sent = f"; the device's collectives take {1e3 * found.collectives:,.1f}" if +counts.calls else ""
        said.append(f"{kernel_set.name}: {low} to {high} ms, the {found.decided_by} decides{graph}{sent}")
    return "\n".join(said)


def _on_ai_cpu(inspection: Inspection, phase: str) -> str | None:
    """Say which launches are far longer than what is estimated for them."""
    said = []
    for kernel_set in inspection.kernel_sets:
        counts = kernel_set.counts[phase]
        names = [f"{number:,} {name}" for name, number in counts.on_ai_cpu.items() if number] if counts else []
        said += [f"{kernel_set.name}: {', '.join(names)}"] * bool(names)
    words = "On the AI CPU, a few scalar cores, for which the estimate is far too low"
    return f"{words}: {'; '.join(said)}." if said else None


def _collectives(inspection: Inspection, phase: str) -> Table:
    """Make a table of what ranks send each other; it has two figures where the kernels change one."""
    table = _new_table("collectives", ("ranks", "calls", "GB"))
    before, after = (kernel_set.counts[phase] for kernel_set in inspection.ends)
    if before is None or after is None:
        table.add_row("not counted")
        return table
    for title, one, other in [("", before, after), *_layers(before, after)]:
        if title and (+one.calls or +other.calls):
            table.add_section()
            table.add_row(title)
        for key in dict.fromkeys([*one.calls, *other.calls]):
            if one.calls[key] or other.calls[key]:
                calls = _both(f"{one.calls[key]:,}", f"{other.calls[key]:,}")
                size = _both(*(_gigabytes(counts.messages[key]) for counts in (one, other)))
                table.add_row(f"{'  ' * bool(title)}{key.operator}", f"{key.ranks} ({key.axis})", calls, size)
    same = before.calls == after.calls and before.messages == after.messages
    table.caption = "The kernels change no collective." if same else "original → with kernels"
    return table


def _both(before: str, after: str, between: str = " → ") -> str:
    return before if before == after else f"{before}{between}{after}"


def _layers(before: Counts | None, after: Counts | None) -> Iterator[tuple[str, Counts, Counts]]:
    """Give what one layer of each kind costs, without kernels and with them."""
    if before is not None and after is not None:
        for one, other in zip(before.layers, after.layers):
            yield f"each of {one.number}\n{one.name}", one.counts, other.counts


def _figures(counts: Counts) -> tuple[float, ...]:
    """Return what the columns of a table show."""
    return (
        counts.launches.total(),
        counts.kernels.total(),
        counts.bytes.total(),
        counts.waits,
        counts.peak,
        counts.estimate.seconds,
        counts.roofline,
    )


def _cells(counts: Counts | None) -> list[str]:
    if counts is None:
        return ["not counted", *[""] * (len(_HEADINGS) - 1)]
    launches, kernels, moved, waits, peak, *seconds = _figures(counts)
    times = (f"{1e3 * each:,.1f}" for each in seconds)
    return [f"{launches:,}", f"{kernels:,}", _gigabytes(moved), str(waits), _gigabytes(peak), *times]


def _gigabytes(size: float) -> str:
    return f"{size / 1e9:,.2f}" if size < 1e11 else f"{size / 1e9:,.0f}"
