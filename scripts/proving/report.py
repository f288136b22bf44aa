"""What the proofs found, on the screen and for the documentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from proving.run import Outcome

RECORD = Path("tests", "data", "variants.json")
# a column of differences: what the tests compared, of which the largest counts
COLUMNS = {
    "float32": ("functions float32", "layers float32"),
    "float16": ("functions float16", "layers float16"),
    "bfloat16": ("functions bfloat16", "layers bfloat16"),
    "models": ("models float32",),
}


def announce(outcome: Outcome, console: Console) -> None:
    """One line when a proof has ended, and what failed in it."""
    proof = outcome.proof
    verdict = "[red]FAILED[/red]" if outcome.failures else "[green]holds[/green]"
    on = f"torch {proof.torch}, torch_npu {proof.torch_npu}, CANN {proof.cann}"
    line = f"{proof.variant} on {on}: {verdict}, {outcome.checks} checks in {outcome.seconds:.0f} s"
    console.print(line, highlight=False, soft_wrap=True)
    for failure in outcome.failures:
        console.print(f"    {failure}", markup=False)
    if outcome.failures:
        log = Path(f"{proof.variant}.log")
        log.write_text(outcome.log)
        console.print(f"    all of it is in {log}", markup=False)


def table(outcomes: Sequence[Outcome]) -> Table:
    """Releases, seconds and largest differences, a row each."""
    made = Table(
        box=box.SIMPLE_HEAD,
        caption="largest differences from float64, and of models from the CPU, relative to the norm",
    )
    made.add_column("variant", no_wrap=True)
    for heading in ("torch_npu", "s", *COLUMNS):
        made.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        name = outcome.proof.variant.removesuffix("-aarch64-linux")
        differences = ["failed"] if outcome.failures else _differences(outcome.largest)
        made.add_row(name, outcome.proof.torch_npu, f"{outcome.seconds:.0f}", *differences)
    return made


def write(outcomes: Sequence[Outcome], root: Path) -> None:
    """Keep what holds, as data of the documentation: the entries of other variants stay."""
    path = root / RECORD
    record = json.loads(path.read_text()) if path.exists() else {}
    for outcome in outcomes:
        if not outcome.failures:
            record[outcome.proof.variant] = {
                "torch_npu": outcome.proof.torch_npu,
                "cann": outcome.proof.cann,
                "checks": outcome.checks,
                "seconds": round(outcome.seconds),
                "largest": {name: float(f"{value:.1e}") for name, value in sorted(outcome.largest.items())},
            }
    path.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")


def _differences(largest: dict[str, float]) -> list[str]:
    found = ([largest[name] for name in names if name in largest] for names in COLUMNS.values())
    return [f"{max(values):.0e}" if values else "" for values in found]
