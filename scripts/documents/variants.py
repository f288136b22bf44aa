"""The table of what was proven of each strict variant: ``make test-variants ARGS=--record`` found it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proving import report
from strict import strict_variants

_ROOT = Path(__file__).resolve().parents[2]
_WORDS: dict[str, dict[str, Any]] = {
    "en": {
        "headings": ["variant", "torch_npu", "checks", "seconds"],
        "of now": "All of it is of the kernels as they are now.",
        "changed": "Marked with * is what ran before the last change of a kernel.",
        "unproven": "without a proof",
    },
    "zh": {
        "headings": ["变体", "torch_npu", "检查数", "秒"],
        "of now": "以上结果均来自当前的内核源码。",
        "changed": "标有 * 的结果早于某个内核的最后一次修改。",
        "unproven": "尚无证明",
    },
}


def table(language: str) -> str:
    """A row for each line of `variants.toml`, and whether the kernels have changed since."""
    words = _WORDS[language]
    record, sources = report.read(_ROOT), report.sources(_ROOT)
    headings = [*words["headings"], *report.COLUMNS]
    lines = [f"| {' | '.join(headings)} |", f"|---|---|{'---:|' * (len(headings) - 2)}"]
    any_changed = False
    for strict in strict_variants(_ROOT):
        found = record.get(strict.name)
        name = f"`{strict.name}`"
        if found is None or (found["torch_npu"], found["cann"]) != (strict.torch_npu, strict.cann):
            lines.append(f"| {name} | {strict.torch_npu} | {words['unproven']} |{' |' * (len(headings) - 3)}")
            continue
        changed = found["sources"] != sources
        any_changed |= changed
        cells = [name + " \\*" * changed, strict.torch_npu, str(found["checks"]), str(found["seconds"])]
        lines.append(f"| {' | '.join([*cells, *map(_short, report.differences(found['largest']))])} |")
    lines += ["", words["changed"] if any_changed else words["of now"]]
    return "".join(f"{line}\n" for line in lines)


def _short(difference: str) -> str:
    return difference.replace("e-0", "e-")
