"""Write the table of how many times its products and attention a model takes, as `kernels-ext-npu inspect` finds it."""

from __future__ import annotations

from typing import NamedTuple

from documents.savings import inspected
from kernels_ext_npu.inspection.counting.counts import Counts


class Row(NamedTuple):
    """A model, and what its training step may take.

    Attributes:
        model: a name that `inspect` takes.
        limit: how many times products and attention alone.
        lora: the rank of adapters; 0 for none, so that all weights are trained.
    """

    model: str
    limit: float
    lora: int = 0


ROWS = (
    Row("Qwen3-8B", 1.105),
    Row("Qwen3-8B", 1.15, lora=16),
    Row("Llama-3.1-8B", 1.09),
    Row("Gemma-3-12B", 1.115),
    Row("Qwen3-0.6B", 1.28),
    Row("Gemma-3-1B", 1.3),
    Row("Qwen3-30B-A3B", 1.2),
    Row("gpt-oss-20b", 1.2),
    Row("glm4_moe", 1.2),
    Row("Qwen3-Next-80B-A3B", 1.25),
    Row("qwen3_5", 1.25),
    Row("kimi_linear", 1.4),
)


def table(_: str) -> str:
    """Write a row for each model, with all kernels; it is in English."""
    headings = "forward", "training step", "limit", "roofline of a step, ms", "its estimate, ms", "its peak, GB"
    lines = [f"| | {' | '.join(headings)} |", f"|---|{'---:|' * len(headings)}"]
    for model, limit, lora in ROWS:
        found = inspected(model, lora)
        counts = found.ends[1].counts
        forward, step = (f"{found.product_ratio(phase, counts[phase]):.2f}" for phase in ("forward", "step"))  # type: ignore[arg-type]
        name = f"{model}, adapters of rank {lora}" if lora else model
        whole: Counts = counts["step"]  # type: ignore[assignment]
        times = (f"{1e3 * seconds:,.0f}" for seconds in (whole.roofline, whole.estimate.seconds))
        cells = name, forward, step, limit, *times, f"{whole.peak / 1e9:.1f}"
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "".join(f"{line}\n" for line in lines)
