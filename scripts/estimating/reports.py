"""Turns reports of ``kernels-ext-npu benchmark`` on a card into rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from estimating import rows
from estimating.rows import Row

# what a call that is timed by itself has before it, by its direction
STARTS = {"forward": {"start": 1}, "backward": {"start_backward": 1}, "both": {"start": 1, "start_backward": 1}}


def add(data: dict[str, Any], report: Path) -> list[Row]:
    """Add the times of a report to the data, and to its file; return the new rows.

    A report says of each call in each direction, by who computed it, the median of its times and its workload.
    """
    told = json.loads(report.read_text("utf-8"))
    machine = told["machine"]
    added = [
        {
            "name": f"{line['of']}, {line['call']}, {line['phase']}, {who}",
            "mode": line["what"].rpartition(", ")[2],
            "dtype": line["dtype"],
            "shapes": line["shapes"],
            "machine": machine,
            "ms": found["median_ms"],
            "work": found["work"] | STARTS[line["what"].rpartition(", ")[2]],
        }
        for line in told["results"]
        for who, found in line.items()
        if isinstance(found, dict) and "median_ms" in found and "work" in found
    ]
    data["reports"] += [row for row in added if row not in data["reports"]]
    write(data)
    return rows.report_rows({"reports": added})


def write(data: dict[str, Any]) -> None:
    """Write the file, a row a line."""
    lines = []
    for name, part in data.items():
        if isinstance(part, list):
            written = ",".join(f"\n  {json.dumps(row)}" for row in part)
            lines.append(f' "{name}": [{written}\n ]')
        else:
            lines.append(f' "{name}": ' + json.dumps(part, indent=2).replace("\n", "\n "))
    rows.FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
