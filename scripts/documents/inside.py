"""Write the table of what CANN's operators do behind a launch, as it is counted: a row of docs/inside.md for each."""

from __future__ import annotations

import softnpu  # noqa: F401  before torch
from kernels_ext_npu.measuring.inside.table import ROWS, Row


def table(_: str) -> str:
    """Write a row for each operator, by its name; it is in English."""
    rows: dict[int, Row] = {id(row): row for row in ROWS.values()}
    lines = ["| operators | what runs | read in |", "|---|---|---|"]
    for row in sorted(rows.values(), key=lambda row: min(row.operators)):
        names = ", ".join(f"`{name}`" for name in sorted(row.operators))
        lines.append(f"| {names} | {' '.join((row.kernels.__doc__ or '').split())} | {row.source} |")
    return "".join(f"{line}\n" for line in lines)
