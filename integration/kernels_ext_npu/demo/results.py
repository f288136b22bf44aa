"""What the demo finds out about a model, and whether that is agreement."""

from __future__ import annotations

from dataclasses import dataclass

import softnpu
from kernels_ext_npu.reporting.report import Report

# float32 on both sides: sums in another order. A real device may multiply float32 matrices in less precision.
TOLERANCE = {True: 1e-5, False: 1e-2}
_NORMS = "npu_rms_norm", "npu_gemma_rms_norm"


@dataclass(frozen=True)
class InGraphs:
    """What the demo found out about decoding in graphs.

    Attributes:
        same_tokens: whether they are those of the original.
        replays: how many tokens were one launch each for the forward; of a card nobody counts them.
    """

    same_tokens: bool
    replays: int


@dataclass(frozen=True)
class Result:
    """What the demo found out about one model.

    Attributes:
        report: what was swapped.
        logits: the largest difference of a logit, relative to the largest logit where that is above one.
        same_tokens: whether greedy generation gave the same tokens.
        gradient: the largest difference of a parameter's gradient, relative to that gradient.
        loss: the largest relative difference of a loss in ten steps of training, None where there were none.
        norm_calls: how often swapped norms were called in one forward.
        calls: operator calls of that forward, by name.
        operators_before: the number of those without kernels.
        training_waits: how often the host waited in a forward and backward.
        in_graphs: the same generation in graphs, None where it was not run.
    """

    report: Report
    logits: float
    same_tokens: bool
    gradient: float
    loss: float | None
    norm_calls: int
    calls: dict[str, int]
    operators_before: int
    training_waits: int
    in_graphs: InGraphs | None = None

    def agrees(self) -> bool:
        """Tell whether a model did with kernels what its original does."""
        tolerance = TOLERANCE[softnpu.is_software()]
        launched = not softnpu.is_software() or sum(self.calls.get(name, 0) for name in _NORMS) == self.norm_calls
        differences = self.logits, self.gradient, self.loss or 0.0
        close = all(difference <= tolerance for difference in differences)  # a NaN is not close
        missed = any(row.is_candidate for row in self.report) and not any(row.swapped for row in self.report)
        graphed = self.in_graphs is None or self.in_graphs.same_tokens
        return close and self.same_tokens and graphed and launched and not missed
