"""Write how far training on several devices is from one process: ``UPDATE=1 make test-distributed`` found it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RECORD = Path(__file__).resolve().parents[2] / "tests" / "data" / "same_numbers.json"
_KINDS = ("loss", "gradients", "weights")
_WORDS = {
    "en": {"headings": ["engine", "checkpointing"]},
    "zh": {"headings": ["引擎", "激活重计算"]},
}


def table(language: str) -> str:
    """Write a row for each engine and kind of checkpointing, a column for each model: loss, gradients, weights."""
    rows: list[dict[str, Any]] = json.loads(_RECORD.read_text("utf-8"))
    models = list(dict.fromkeys(row["model"] for row in rows))
    cells = {(row["engine"], row["checkpointing"], row["model"]): _cell(row) for row in rows}
    headings = [*_WORDS[language]["headings"], *models]
    lines = [f"| {' | '.join(headings)} |", f"|---|---|{'---:|' * len(models)}"]
    for engine, checkpointing in _ordered(rows):
        found = [cells.get((engine, checkpointing, model), "–") for model in models]
        lines.append(f"| {engine} | {checkpointing} | {' | '.join(found)} |")
    return "".join(f"{line}\n" for line in lines)


def _ordered(rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """List the engines as they were recorded, and of each the kinds in the order of its first model, which has all."""
    return list(dict.fromkeys((row["engine"], row["checkpointing"]) for row in rows))


def _cell(row: dict[str, Any]) -> str:
    return " · ".join(f"{row[kind]:.0e}".replace("e-0", "e-") if row[kind] else "0" for kind in _KINDS)
