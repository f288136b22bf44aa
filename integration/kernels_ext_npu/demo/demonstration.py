"""The demo: tiny models, or a checkpoint, on an NPU with kernels swapped in, against their originals on the CPU."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import softnpu  # isort: skip  before torch

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from transformers.utils import logging

import kernels_ext_npu
from kernels_ext_npu.catalogue import ATTENTION, HEADS, PATCHES
from kernels_ext_npu.demo.model_comparison import IN_GRAPHS, Result, compare, operators, save
from kernels_ext_npu.machine import description
from kernels_ext_npu.model_configs import TINY
from kernels_ext_npu.reporting.report import SHOWN

STEPS = 10
_COLUMNS = (*(kind for kind in SHOWN if kind is not PATCHES), HEADS)  # all kinds would not fit
# headings of the table of calls -> what the names of the operators contain
FUSED = {
    "rms norm": "rms_norm",
    "rotary mul": "npu_rotary_mul",
    "gated unit": "glu",
    "grouped matmul": "npu_grouped_matmul",
    "fused attn": "npu_fusion_attention",
}


def show(console: Console, checkpoint: Path | None = None, trusts_code: bool = False) -> bool:
    """Show the tiny models, or a checkpoint, whose own code may run if so, and return whether everything agreed."""
    logging.disable_progress_bar()
    kernels_ext_npu.register()
    console.print(machine(description.describe()))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is not None:
            results[checkpoint.name] = compare(checkpoint, steps=0, trust_remote_code=trusts_code)
        for name in track(() if checkpoint else TINY, "models", console=console, transient=True):
            save(name, Path(folder) / name)
            results[name] = compare(Path(folder) / name, STEPS, name in IN_GRAPHS)
    for name, result in results.items():
        console.print(f"\n[bold]{name}[/]")
        console.print(result.report)
    console.print("\nSwapped:")
    console.print(swaps(results))
    if softnpu.is_software():
        console.print("\nCalls of a forward, and before the swap; host waits in it and in a training step:")
        console.print(calls(results))
    console.print("\nLargest differences from the original on the CPU in float32, and of ten losses:")
    console.print(agreement(results))
    if softnpu.is_software():
        console.print("\nThe software device computed this, no card.")
    return all(result.agrees() for result in results.values())


def machine(described: dict[str, Any]) -> Table:
    """Make a table of the device and of the packages."""
    table = Table(show_header=False, box=None)
    table.add_row("device", description.device(described))
    for name, value in description.versions(described).items():
        table.add_row(name, value)
    return table


def swaps(results: dict[str, Result]) -> Table:
    """Make a table of how many of each kind were swapped."""
    found = {row.kind for result in results.values() for row in result.report}
    kinds = [kind.in_models for kind in _COLUMNS if kind.in_models in found]
    table = _table(["attn" if kind == ATTENTION.in_models else kind for kind in kinds])
    for name, result in results.items():
        rows = [[row.swapped for row in result.report if row.kind == kind] for kind in kinds]
        table.add_row(name, *(f"{sum(swapped)} of {len(swapped)}" for swapped in rows))
    return table


def calls(results: dict[str, Result]) -> Table:
    """Make a table of what a forward called, and how often the host waited."""
    table = _table([*FUSED, "in all", "before", "waits", "a step"])
    for name, result in results.items():
        counted = [sum(count for op, count in result.calls.items() if part in op) for part in FUSED.values()]
        counted += [operators(result.calls), result.operators_before, *result.waits]
        table.add_row(name, *map(str, counted))
    return table


def agreement(results: dict[str, Result]) -> Table:
    """Make a table of what was compared with the original."""
    table = _table(["logits", "gradients", "losses", "greedy tokens", "in graphs", "agrees"])
    for name, result in results.items():
        tokens = "equal" if result.same_tokens else "[red]differ[/]"
        loss = "not run" if result.loss is None else f"{result.loss:.1e}"
        agrees = "[green]yes[/]" if result.agrees() else "[red]no[/]"
        table.add_row(name, f"{result.logits:.1e}", f"{result.gradient:.1e}", loss, tokens, _graphed(result), agrees)
    return table


def _graphed(result: Result) -> str:
    if result.same_in_graphs is None:
        return "not run"
    replays = f", {result.replays} replays" if softnpu.is_software() else ""
    return f"equal{replays}" if result.same_in_graphs else "[red]differ[/]"


def _table(columns: list[str]) -> Table:
    """Make a table with a row a model; headings go down, a word a line, so that eighty characters hold them."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    table.add_column(no_wrap=True)
    for column in columns:
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    return table
