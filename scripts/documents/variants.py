"""Write what was proven of each variant: ``make test-variants ARGS=--record`` found it."""

from __future__ import annotations

from pathlib import Path

from proving import report
from proving.pairs import proofs
from strict import strict_variants

_ROOT = Path(__file__).resolve().parents[2]
_HEADINGS = ["variant", "torch_npu", "checks", "seconds", *report.COLUMNS]


def table(_: str) -> str:
    """Write a row for each proof of `make test-variants`, and whether the kernels have changed since; in English."""
    record, sources = report.read(_ROOT), report.sources(_ROOT)
    lines = [f"| {' | '.join(_HEADINGS)} |", f"|---|---|{'---:|' * (len(_HEADINGS) - 2)}"]
    any_changed = False
    for proof in proofs(strict_variants(_ROOT)):
        found = record.get(proof.name)
        name = f"`{proof.variant}`"
        if found is None or found["cann"] != proof.cann:
            lines.append(f"| {name} | {proof.torch_npu} | without a proof |{' |' * (len(_HEADINGS) - 3)}")
            continue
        changed = found["sources"] != sources
        any_changed |= changed
        cells = [name + " \\*" * changed, proof.torch_npu, str(found["checks"]), str(found["seconds"])]
        lines.append(f"| {' | '.join([*cells, *map(_short, report.differences(found['largest']))])} |")
    changes = "Marked with * is what ran before the last change of a kernel."
    lines += ["", changes if any_changed else "All of it is of the kernels as they are now."]
    return "".join(f"{line}\n" for line in lines)


def _short(difference: str) -> str:
    return difference.replace("e-0", "e-")
