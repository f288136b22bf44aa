"""Runs every call of the models, by each who can compute it, and collects what was found."""

from __future__ import annotations

import copy
import gc
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch_npu
from torch import Tensor
from transformers import PreTrainedModel

import kernels_ext_npu
import softnpu
from kernels_ext_npu.benchmarking import agreement, measuring, steps, timing
from kernels_ext_npu.benchmarking.agreement import DisagreementError, Distances
from kernels_ext_npu.benchmarking.calls import Call, Phase, phases, record
from kernels_ext_npu.benchmarking.choices import DTYPES, Asked
from kernels_ext_npu.benchmarking.measuring import Work
from kernels_ext_npu.benchmarking.models import Model
from kernels_ext_npu.benchmarking.providers import ORIGINAL, Provider
from kernels_ext_npu.benchmarking.timing import Before, Run


@dataclass(frozen=True)
class Result:
    """One call in one direction by one provider: figures, or why there are none.

    Attributes:
        distance: the distance of its worst output or gradient from float32, relative; by norm.
        figures: launches, bytes and so on, by name; on a card times too.
        refused: why there are no figures.
        wrong: whether that is because it disagrees, or raised.
    """

    model: str
    dtype: str
    phase: str
    kernel: str
    name: str
    path: str
    shapes: list[list[int]]
    provider: str
    direction: str
    distance: float | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    wrong: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that have a value and the figures in one dictionary, for JSON."""
        fields = asdict(self)
        figures = fields.pop("figures")
        return {key: value for key, value in (fields | figures).items() if value is not None}


def run(model: Model, dtype: str, asked: Asked, found: list[Provider]) -> Iterator[Result]:
    """Measure a model by everybody who can compute it, one phase after the other, and give each result.

    Args:
        dtype: bf16 or fp16.
        asked: what is measured of it.
        found: who computes it, the original first: the others are compared with what it differs.

    Raises:
        CannotRunError: the model cannot be built.
    """
    parts = [kernel for kernel in asked.kernels if kernel not in steps.KERNELS]
    for phase in phases(asked.tokens):
        if parts:
            yield from _run_phase(model, dtype, phase, partial(record, kernels=parts), found, asked.repeats)
            _free()
        if whole := steps.wanted(asked.kernels, phase):
            calls_of = partial(steps.calls, kernels=whole)
            yield from _run_phase(model.whole(), dtype, phase, calls_of, found, asked.repeats)
            _free()


def _free() -> None:
    gc.collect()
    torch_npu.npu.empty_cache()


def _run_phase(
    source: Model,
    dtype_name: str,
    phase: Phase,
    calls_of: Callable[[Model, PreTrainedModel, Phase], list[Call]],
    found: list[Provider],
    repeats: int,
) -> Iterator[Result]:
    dtype: torch.dtype = getattr(torch, DTYPES[dtype_name])
    model = source.build(dtype).train(phase.training)
    plain = copy.deepcopy(model)
    # one expert after the other, as they are written in their model: what has the fewest parts that could be missing
    plain.set_experts_implementation("eager")
    try:
        calls = calls_of(source, plain, phase)
    except Exception as error:
        yield _no_calls(source, dtype_name, phase, error)
        return
    exact = [_exact(Work(call, plain.float(), torch.float32, phase.training), dtype) for call in calls]
    del plain
    originals: dict[Call, Distances] = {}
    for provider in found:
        candidate = model if provider.name == ORIGINAL else copy.deepcopy(model)
        with provider.applied(candidate) as refuse:
            for call, reference in zip(calls, exact):
                work = Work(call, candidate, dtype, phase.training, reference.gradients)
                reason = refuse(call)
                outcomes = (
                    [_nothing(work, reason)] if reason else _outcomes(work, reference, originals, provider, repeats)
                )
                for outcome in outcomes:
                    identity = (source.name, dtype_name, str(phase), call.kernel, call.name, call.path, call.shapes())
                    yield Result(*identity, provider.name, **outcome)


def _no_calls(source: Model, dtype: str, phase: Phase, error: Exception) -> Result:
    reason = f"{_sentence(error)}. If --shrink divided what has to fit, try another one, or 1"
    shapes: list[list[int]] = []
    whole = (source.name, dtype, str(phase), "layer", "the whole model", "", shapes, ORIGINAL, "forward")
    return Result(*whole, refused=reason, wrong=True)


@dataclass(frozen=True)
class Exact:
    """The original in float32: its outputs and gradients, and the gradients of outputs that gave them."""

    results: dict[str, Tensor] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    failed: str | None = None


def _exact(work: Work, dtype: torch.dtype) -> Exact:
    try:
        results = work.results()
    except Exception as error:
        return Exact(failed=f"there is nothing to compare with: in float32 the original {_sentence(error)}")
    return Exact(results, [gradient.to(dtype) for gradient in work.gradients])


def _outcomes(
    work: Work, exact: Exact, originals: dict[Call, Distances], provider: Provider, repeats: int
) -> Iterator[dict[str, Any]]:
    """Compare what a provider makes of a call, then count and time it; give the outcome of each direction."""
    if exact.failed or (work.call not in originals and provider.name != ORIGINAL):
        yield _nothing(work, exact.failed or "there is nothing to compare with: the original failed")
        return
    try:
        distances = agreement.distances(work.results(), exact.results)
        agreement.check(distances, originals.get(work.call, distances), work.dtype)
        distance = max((distance.norm for distance in distances.values()), default=0.0)
        for direction, (before, measured) in work.directions().items():
            yield {"direction": direction, "distance": distance, "figures": _figures(before, measured, repeats)}
    except DisagreementError as error:
        yield _nothing(work, f"disagrees: {error}") | {"wrong": True}
    except Exception as error:  # whatever an operator raises: the others go on
        yield _nothing(work, _sentence(error)) | {"wrong": True}
    else:
        originals.setdefault(work.call, distances)


def _nothing(work: Work, reason: str) -> dict[str, Any]:
    return {"direction": "both" if work.gradients else "forward", "refused": reason}


def _sentence(error: Exception) -> str:
    return f"raised {type(error).__name__}: {(str(error).strip() or 'without a word').splitlines()[0]}"


def _figures(before: Before, measured: Run, repeats: int) -> dict[str, Any]:
    figures: dict[str, Any] = measuring.count(before, measured)
    if not softnpu.is_software():
        figures |= timing.spread(timing.times(timing.DeviceClock(), before, measured, timing.WARM_UP, repeats))
    return figures


def environment(llama_factory: str) -> dict[str, Any]:
    """Return the device and the versions of everything, as the report names them."""
    from torch_npu.utils.collect_env import get_cann_version

    device = torch_npu.npu.get_device_name(0)
    packages = ("torch", "torch_npu", "transformers", "kernels")
    return {
        "device": f"software device, as {device}" if softnpu.is_software() else device,
        "versions": {
            "kernels-ext-npu": kernels_ext_npu.__version__,
            "LLaMA-Factory": llama_factory,
            "Python": platform.python_version(),
            **{package: version(package) for package in packages},
            "CANN": "none" if softnpu.is_software() else get_cann_version(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
    }
