"""Compares a model with kernels on the NPU with its original on the CPU."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, CompileConfig

import kernels_ext_npu
import softnpu
from kernels_ext_npu.catalogue import NORMS
from kernels_ext_npu.demo import tiny_models
from kernels_ext_npu.environment import RefusedError
from kernels_ext_npu.measuring import waits
from kernels_ext_npu.measuring.distance import distance, distances, models_agree, worst
from kernels_ext_npu.reporting.report import Report
from softnpu.counting import DEVICE_TO_HOST_COPIES, STREAM_SYNCS

NEW_TOKENS = 8
LEARNING_RATE = 0.1
_NORM_OPERATORS = "npu_rms_norm", "npu_gemma_rms_norm"
Gradients = dict[str, Tensor | None]


@dataclass(frozen=True)
class InGraphs:
    """What was found out about decoding in graphs.

    Attributes:
        same_tokens: whether they are those of the original.
        replays: how many tokens were one launch each for the forward; of a card nobody counts them.
    """

    same_tokens: bool
    replays: int


@dataclass(frozen=True)
class Result:
    """What was found out about one model.

    Attributes:
        report: what was swapped.
        logits: the largest difference of a logit, relative to the largest logit.
        same_tokens: whether greedy generation gave the same tokens.
        gradient: the largest difference of a parameter's gradient, relative to that gradient.
        loss: the largest relative difference of a loss in ten steps of training, None where there were none.
        norm_calls: how often swapped norms were called in one forward.
        calls: operator calls of that forward, by name.
        operators_before: the number of those without kernels.
        waits: how often the host waited in that forward, and in a forward and backward.
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
    waits: tuple[int, int]
    in_graphs: InGraphs | None = None

    def agrees(self) -> bool:
        """Tell whether a model did with kernels what its original does."""
        launched = sum(self.calls.get(name, 0) for name in _NORM_OPERATORS) == self.norm_calls
        missed = any(row.is_candidate for row in self.report) and not any(row.swapped for row in self.report)
        graphed = self.in_graphs is None or self.in_graphs.same_tokens
        close = models_agree(self.logits, self.gradient, self.loss or 0.0)
        return close and self.same_tokens and graphed and (launched or not softnpu.is_software()) and not missed


def compare(folder: Path, steps: int, in_graphs: bool = False) -> Result:
    """Run a model with kernels against its original, which comes first.

    A rotary function with a kernel is one object for the process, and would serve the original too.

    Args:
        folder: the checkpoint.
        steps: of training; none for a model that is not to be changed.
        in_graphs: whether it generates a second time, with one launch for the forward of a token.

    Raises:
        RefusedError: the checkpoint cannot be loaded.
    """
    torch.manual_seed(0)
    original = load(folder)
    made = tiny_models.inputs(original.config)
    expected, expected_tokens = logits(original, made), _tokens(original, made)
    expected_gradients = gradients(original, made)
    expected_losses = _losses(original, made, steps)

    model = load(folder, device_map="npu", use_kernels=True)
    moved = tiny_models.on("npu", made)
    report = kernels_ext_npu.report(model)
    same_tokens = torch.equal(expected_tokens, _tokens(model, moved).cpu())
    softnpu.reset_counters()
    with _count_calls(model, report) as norm_calls, waits.counted() as in_forward:
        found = logits(model, moved)
    calls = softnpu.counters()
    graphed = _in_graphs(model, moved, expected_tokens) if in_graphs else None
    with waits.counted() as in_step:
        found_gradients = gradients(model, moved)
    gradient = worst(measured.norm for measured in distances(found_gradients, expected_gradients).values())
    losses = distances(_losses(model, moved, steps), expected_losses).values()

    kernels_ext_npu.restore(model.eval())
    softnpu.reset_counters()
    logits(model, moved)
    return Result(
        report=report,
        logits=distance(found, expected).largest,
        same_tokens=same_tokens,
        gradient=gradient,
        loss=worst(measured.norm for measured in losses) if steps else None,
        norm_calls=norm_calls.total(),
        calls=calls,
        operators_before=operators(softnpu.counters()),
        waits=(in_forward.number, in_step.number),
        in_graphs=graphed,
    )


def load(folder: Path, **options: Any) -> Any:
    """Load a checkpoint in float32.

    Raises:
        RefusedError: it cannot be loaded.
    """
    auto = tiny_models.loader(AutoConfig.from_pretrained(folder, local_files_only=True))
    try:
        return auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{folder} could not be loaded: {error}") from error


@torch.no_grad()
def logits(model: Any, made: tiny_models.Inputs) -> Tensor:
    """Return the logits of a forward without gradients."""
    return model(**made).logits


def gradients(model: nn.Module, made: tiny_models.Inputs) -> Gradients:
    """Compute the gradients of one step, without what is drawn at random: two devices draw differently.

    Returns:
        a gradient for each parameter, in their order; None for those without one.
    """
    model.train().zero_grad()
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (isinstance(module, nn.Dropout) or re.search("drop|jitter", name)):
                setattr(module, name, 0.0)
    model(**made, labels=made["input_ids"]).loss.backward()
    return {f"gradient of {i}": parameter.grad for i, parameter in enumerate(model.parameters())}


def operators(counters: dict[str, int]) -> int:
    """Return how many operators were called."""
    return sum(calls for name, calls in counters.items() if name not in (STREAM_SYNCS, DEVICE_TO_HOST_COPIES))


def _tokens(model: Any, made: tiny_models.Inputs, **options: Any) -> Tensor:
    return model.generate(**made, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def _in_graphs(model: Any, made: tiny_models.Inputs, expected: Tensor) -> InGraphs:
    softnpu.reset_counters()
    graphs = CompileConfig(backend="NPUGraph")
    found = _tokens(model, made, cache_implementation="static", compile_config=graphs).cpu()
    return InGraphs(torch.equal(found, expected), softnpu.counters().get("graph_replays", 0))


def _losses(model: nn.Module, made: tiny_models.Inputs, steps: int) -> dict[str, Tensor]:
    """Train on one batch, and return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**made, labels=made["input_ids"]).loss
        loss.backward()
        optimizer.step()
        losses[f"loss {step}"] = loss.detach()
    return losses


@contextmanager
def _count_calls(model: nn.Module, report: Report) -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    paths = [row.path for row in report if row.swapped and row.kind == NORMS.in_models]
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: calls.update([path]))
        for path in paths
    ]
    yield calls
    for hook in hooks:
        hook.remove()
