"""What is said of a selftest: a table for people, and JSON that can be attached to an issue."""

from __future__ import annotations

import math
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kernels_ext_npu.machine.description import SOFTWARE
from kernels_ext_npu.machine.privacy import anonymous, report_text
from kernels_ext_npu.selftest.runner import Outcome

MODELS = "models"  # what a test is of that is of no repository
_HEADINGS = ("tests", "forward", "backward", "peak MB", "host waits", "agree")


def to_text(outcome: Outcome) -> str:
    """Return every figure as JSON, a result a line, with nothing that tells whose machine it was."""
    head = {"machine": outcome.machine, "quick": outcome.quick, "agrees": outcome.agrees}
    # JSON has no infinity, which is the difference of what is no number
    rows = [{key: "inf" if value == math.inf else value for key, value in row.items()} for row in outcome.results]
    return report_text(head, rows)


def show(console: Console, outcome: Outcome) -> None:
    """Print a row for each repository and dtype, what does not agree, and what it ran on."""
    console.print(_table(outcome))
    console.print(_legend(outcome), highlight=False, markup=False)
    console.print(_verdict(outcome))


def _table(outcome: Outcome) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    table.add_column(no_wrap=True)
    for heading in _HEADINGS:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in outcome.results:
        groups.setdefault(f"{row['of']}, {row['dtype']}", []).append(row)
    for group, rows in groups.items():
        agree = sum(row["agrees"] for row in rows)
        waits = [sum(row["waits"]) for row in rows if "waits" in row]
        table.add_row(
            group,
            str(len(rows)),
            *(f"{max((row[key] for row in rows if key in row), default=0):.1e}" for key in ("forward", "backward")),
            f"{max((row.get('peak_bytes', 0) for row in rows), default=0) / 1e6:.1f}",
            str(sum(waits)) if waits else "–",
            Text(f"{agree} of {len(rows)}", style="green" if agree == len(rows) else "bold red"),
        )
    return table


def _legend(outcome: Outcome) -> str:
    """Say what the numbers of the table are, what is allowed, and of which machine they are."""
    measured = [row for row in outcome.results if "tolerance" in row]
    tolerances = {row["of"] if row["of"] == MODELS else row["dtype"]: row["tolerance"] for row in measured}
    allowed = ", ".join(f"{name} {value:.1e}" for name, value in tolerances.items())
    left_out = ("device", "chip") if outcome.machine.get("device") == SOFTWARE else ("device",)
    machine = {name: value for name, value in outcome.machine.items() if value is not None and name not in left_out}
    return (
        "forward, backward: the largest difference of an output and of a gradient, relative, from float64 on the host, "
        f"of models from their originals; allowed: {allowed}. "
        "host waits: of a forward and a training step of each model.\n"
        f"{', '.join(f'{name} {value}' for name, value in machine.items())}"
    )


def _verdict(outcome: Outcome) -> RenderableType:
    lines = []
    for row in outcome.results:
        if not row["agrees"]:
            said = row.get("error") or (
                f"forward {row['forward']:.1e}, backward {row['backward']:.1e}, where {row['tolerance']:.1e} is allowed"
            )
            what = f"{row['of']}, {row['what']}, {row['dtype']}"
            lines.append(Text(f"{what}: {anonymous(said)}", style="red"))
    count = len(lines)
    machine = outcome.machine
    device = "the software device, no card" if machine.get("device") == SOFTWARE else f"{machine.get('chip')}"
    agrees = f"all {len(outcome.ids)} agree" if not count else f"{count} of {len(outcome.ids)} do not agree"
    lines.append(Text(f"On {device}: {agrees}.", style="bold green" if not count else "bold red"))
    return Group(*lines)
