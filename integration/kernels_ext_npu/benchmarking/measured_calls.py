"""Runs every call of the models, by each who can compute it, and collects what was found."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch_npu
from transformers import PreTrainedModel

from kernels_ext_npu.benchmarking import agreement, call_costs, recorded_calls
from kernels_ext_npu.benchmarking.agreement import Distances
from kernels_ext_npu.benchmarking.call_costs import Work
from kernels_ext_npu.benchmarking.options import DTYPES
from kernels_ext_npu.benchmarking.providers import ORIGINAL, Provider
from kernels_ext_npu.benchmarking.recorded_calls import HEAD, STEP, Call, Phase, phases, record
from kernels_ext_npu.benchmarking.shrunk_models import Model
from kernels_ext_npu.environment import first_line
from kernels_ext_npu.measuring.distance import DisagreementError, distances

CallFinder = Callable[[Model, PreTrainedModel, Phase], list[Call]]


@dataclass(frozen=True)
class Result:
    """One call in one direction by one provider: figures, or why there are none."""

    model: str
    dtype: str
    phase: str
    kernel: str
    name: str
    path: str
    shapes: list[list[int]]
    provider: str
    direction: str
    distance: float | None = None  # the distance of its worst output or gradient from float32, relative; by norm
    figures: dict[str, Any] = field(default_factory=dict)  # launches, bytes and so on, by name; on a card times too
    refused: str | None = None  # why there are no figures
    wrong: bool = False  # whether that is because it disagrees, or raised

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that have a value and the figures in one dictionary, for JSON."""
        fields = asdict(self)
        figures = fields.pop("figures")
        return {key: value for key, value in (fields | figures).items() if value is not None}


def run(
    model: Model, dtype: str, kernels: list[str], tokens: int, repeats: int, found: dict[str, Provider]
) -> Iterator[Result]:
    """Measure a model by everybody who can compute it, one phase after the other, and give each result.

    Args:
        dtype: bf16 or fp16.
        kernels: the repositories whose calls are measured, "layer" for that of the last layer, and "step" for that of
            the whole model.
        tokens: those of a prefill and of a training step.
        repeats: how many times a call is timed on a card.
        found: who computes it, the original first: the others are compared with what it differs.

    Raises:
        RefusedError: the model cannot be built.
    """
    parts = [kernel for kernel in kernels if kernel not in (STEP, HEAD)]
    for phase in phases(tokens):
        if parts:
            yield from _run_phase(model, dtype, phase, partial(record, kernels=parts), found, repeats)
        if whole := [kernel for kernel in kernels if kernel == STEP or (kernel == HEAD and phase.training)]:
            find_calls = partial(recorded_calls.whole_model_calls, kernels=whole)
            yield from _run_phase(model.whole(), dtype, phase, find_calls, found, repeats)


def _run_phase(
    source: Model, dtype_name: str, phase: Phase, find_calls: CallFinder, found: dict[str, Provider], repeats: int
) -> Iterator[Result]:
    gc.collect()
    torch_npu.npu.empty_cache()
    dtype: torch.dtype = getattr(torch, DTYPES[dtype_name])
    model = source.build(dtype).train(phase.training)
    plain = copy.deepcopy(model)
    # one expert after the other, as they are written in their model: what has the fewest parts that could be missing
    plain.set_experts_implementation("eager")
    try:
        calls = find_calls(source, plain, phase)
    except Exception as error:
        refused = f"{_sentence(error)}. If --shrink divided what has to fit, try another one, or 1"
        whole = (source.name, dtype_name, str(phase), "layer", "the whole model", "")
        yield Result(*whole, [], ORIGINAL, "forward", refused=refused, wrong=True)
        return
    exact = [_exact(Work(call, plain.float(), torch.float32, phase.training), dtype) for call in calls]
    del plain
    originals: dict[Call, Distances] = {}
    for name, provider in found.items():
        candidate = model if name == ORIGINAL else copy.deepcopy(model)
        with provider(candidate) as refuse:
            for call, reference in zip(calls, exact):
                work = Work(call, candidate, dtype, phase.training, reference.gradients)
                identity = (source.name, dtype_name, str(phase), call.kernel, call.name, call.path, call.shapes())
                result = Result(*identity, name, "both" if work.gradients else "forward")
                if reason := refuse(call):
                    yield replace(result, refused=reason)
                else:
                    yield from _compared(result, work, reference, originals, repeats)


@dataclass(frozen=True)
class Exact:
    """The original in float32: its outputs and gradients, and the gradients of outputs that gave them."""

    results: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: list[torch.Tensor] = field(default_factory=list)
    failed: str | None = None


def _exact(work: Work, dtype: torch.dtype) -> Exact:
    try:
        results = work.results()
    except Exception as error:
        return Exact(failed=f"there is nothing to compare with: in float32 the original {_sentence(error)}")
    return Exact(results, [gradient.to(dtype) for gradient in work.gradients])


def _compared(
    result: Result, work: Work, exact: Exact, originals: dict[Call, Distances], repeats: int
) -> Iterator[Result]:
    """Compare what a provider makes of a call, then count and time it; give the result of each direction."""
    if exact.failed or (work.call not in originals and result.provider != ORIGINAL):
        yield replace(result, refused=exact.failed or "there is nothing to compare with: the original failed")
        return
    try:
        measured = distances(work.results(), exact.results)
        agreement.check(measured, originals.get(work.call, measured), work.dtype)
        distance = max((each.norm for each in measured.values()), default=0.0)
        for direction, (before, timed) in work.directions().items():
            figures = call_costs.count(before, timed) | call_costs.times(before, timed, repeats)
            yield replace(result, direction=direction, distance=distance, figures=figures)
    except DisagreementError as error:
        yield replace(result, refused=f"disagrees: {error}", wrong=True)
    except Exception as error:  # whatever an operator raises: the others go on
        yield replace(result, refused=_sentence(error), wrong=True)
    else:
        originals.setdefault(work.call, measured)


def _sentence(error: Exception) -> str:
    return f"raised {type(error).__name__}: {first_line(error)}"
