"""Report what the proofs found, on the screen and for the documentation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from proving.pairs import proofs
from proving.run import Outcome
from strict import strict_variants

RECORD = Path("tests", "data", "variants.json")
# a column of differences: what the tests compared, of which the largest counts
COLUMNS = {
    "float32": ("functions float32", "layers float32"),
    "float16": ("functions float16", "layers float16"),
    "bfloat16": ("functions bfloat16", "layers bfloat16"),
    "models": ("models float32",),
}


def announce(outcome: Outcome, console: Console, logs: Path) -> None:
    """Print a line when a proof has ended, and what failed in it; then all that it printed is in a file of ``logs``."""
    proof = outcome.proof
    verdict = "[red]FAILED[/red]" if outcome.failures else "[green]holds[/green]"
    on = f"torch {proof.torch}, torch_npu {proof.torch_npu}, CANN {proof.cann}"
    line = f"{proof.variant} on {on}: {verdict}, {outcome.checks} checks in {outcome.seconds:.0f} s"
    console.print(line, highlight=False, soft_wrap=True)
    for failure in outcome.failures:
        console.print(f"    {failure}", markup=False)
    if outcome.failures:
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{proof.name}.log"
        log.write_text(outcome.log)
        console.print(f"    all of it is in {log}", markup=False, soft_wrap=True)


def table(outcomes: Sequence[Outcome]) -> Table:
    """List releases, seconds and largest differences, a row each."""
    caption = "largest differences from float64, of models from the CPU, relative to the norm"
    made = Table(box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, caption=caption)
    made.add_column("variant", no_wrap=True)
    for heading in ("torch_npu", "s", *COLUMNS):
        made.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        name = outcome.proof.variant.removesuffix("-aarch64-linux")
        found = ["failed"] if outcome.failures else differences(outcome.largest)
        made.add_row(name, outcome.proof.torch_npu, f"{outcome.seconds:.0f}", *found)
    return made


def write(outcomes: Sequence[Outcome], root: Path) -> None:
    """Keep what holds, as data of the documentation, if it is one of those that run without pairs; the rest stays."""
    record, named = read(root), proofs(strict_variants(root))
    for outcome in outcomes:
        proof = outcome.proof
        if not outcome.failures and proof in named:
            record[proof.name] = {
                "torch_npu": proof.torch_npu,
                "cann": proof.cann,
                "sources": sources(root),
                "checks": outcome.checks,
                "seconds": round(outcome.seconds),
                "largest": {name: float(f"{value:.1e}") for name, value in sorted(outcome.largest.items())},
            }
    (root / RECORD).write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")


def read(root: Path) -> dict[str, Any]:
    """Read what is kept, by the names of proofs."""
    path = root / RECORD
    return json.loads(path.read_text()) if path.exists() else {}


def sources(root: Path) -> dict[str, str]:
    """Digest the kernels, to tell those that were proven from later ones: repository -> digest of its variants."""
    found = {}
    for path in sorted(root.glob("*/build/torch-universal/metadata.json")):
        files = json.dumps(json.loads(path.read_text())["digest"]["files"], sort_keys=True)
        found[path.parts[-4]] = hashlib.sha256(files.encode()).hexdigest()[:12]
    return found


def differences(largest: dict[str, float]) -> list[str]:
    """Return the largest of each of the COLUMNS, empty where nothing was compared."""
    found = ([largest[name] for name in names if name in largest] for names in COLUMNS.values())
    return [f"{max(values):.0e}" if values else "" for values in found]
