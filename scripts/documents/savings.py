"""Write the table of what the kernels save, as `kernels-ext-npu inspect` finds it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import softnpu  # noqa: F401  before torch
from kernels_ext_npu.inspection import picture, subject
from kernels_ext_npu.inspection.counting.counts import Counts
from kernels_ext_npu.inspection.counting.phases import STATIC, replays
from kernels_ext_npu.inspection.inspecting import Inspection, inspect
from kernels_ext_npu.measuring.roofline import SOCS

MODELS = ("Qwen3-8B", "Gemma-3-12B", "Qwen3-30B-A3B", "gpt-oss-20b")
PICTURE = {"docs/qwen3-30b-a3b.png": "Qwen3-30B-A3B"}

_HEADINGS = {
    "en": ["", "launches", "kernels", "GB that move", "host waits", "peak GB", "launches of a token", "GB of a token"],
    "zh": ["", "下发次数", "核函数", "访存 GB", "主机等待", "峰值 GB", "每个 token 的下发次数", "每个 token 的访存 GB"],
}
_GRAPHS = {"en": "in graphs", "zh": "用图"}
_PHASES = {
    "en": {"forward": "forward", "step": "training step"},
    "zh": {"forward": "前向", "step": "训练步"},
}


def table(language: str) -> str:
    """Write a row for each model and phase: before → after."""
    headings = _HEADINGS[language]
    lines = [f"| {' | '.join(headings)} |", f"|---|{'---:|' * (len(headings) - 1)}"]
    for model in MODELS:
        before, after = (kernel_set.counts for kernel_set in inspected(model, 0).kernel_sets)
        for phase, name in _PHASES[language].items():
            token = _token(model, language) if phase == "forward" else ("", "")
            cells = *_cells(before[phase], after[phase]), *token
            lines.append(f"| {model}, {name} | {' | '.join(cells)} |")
    return "".join(f"{line}\n" for line in lines)


def draw(root: Path) -> None:
    """Write the pictures anew."""
    for path, model in PICTURE.items():
        picture.plot(inspect(subject.find(model), SOCS["910b3"], update=True), root / path)


@cache
def inspected(model: str, lora: int) -> Inspection:
    """Inspect the whole of a model that is known by name, with adapters of a rank that is not 0."""
    return inspect(subject.find(model), SOCS["910b3"], lora=lora)


@cache
def decoded(model: str) -> Inspection:
    """Inspect a step of decoding of the whole of a model."""
    return inspect(subject.find(model), SOCS["910b3"], decode=True)


def _token(model: str, language: str) -> tuple[str, str]:
    """Write the launches and bytes of a step with a static cache, and the graphs that it is."""
    before, after = (kernel_set.counts[STATIC] for kernel_set in decoded(model).kernel_sets)
    assert before is not None
    assert after is not None
    launches = f"{_number(before.launches.total())} → {_number(after.launches.total())}"
    graphs = replays(STATIC, after)
    moved = f"{_number(before.bytes.total() / 1e9)} → {_number(after.bytes.total() / 1e9)}"
    return f"{launches}; {_GRAPHS[language]} {graphs}" if graphs else launches, moved


def _cells(before: Counts | None, after: Counts | None) -> list[str]:
    assert before is not None
    assert after is not None
    pairs = [
        (before.launches.total(), after.launches.total()),
        (before.kernels.total(), after.kernels.total()),
        (before.bytes.total() / 1e9, after.bytes.total() / 1e9),
        (before.waits, after.waits),
        (before.peak / 1e9, after.peak / 1e9),
    ]
    return [f"{_number(one)} → {_number(other)}" for one, other in pairs]


def _number(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 100 else f"{value:.1f}"
