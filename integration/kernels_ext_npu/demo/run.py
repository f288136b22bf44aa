"""Runs the demo: models on an NPU with kernels swapped in, against their originals on the CPU."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

# transformers, torch_npu and its C++ report what is none of a reader's business here
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import softnpu  # isort: skip  before torch

import torch
import torch_npu
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import AutoConfig
from transformers.utils import logging

import kernels_ext_npu
from kernels_ext_npu.catalogue import ATTENTION, HEADS, NORMS
from kernels_ext_npu.demo import models
from kernels_ext_npu.reporting.report import SHOWN, Report
from softnpu.counting import DEVICE_TO_HOST_COPIES, STREAM_SYNCS

NEW_TOKENS = 8
STEPS, LEARNING_RATE = 10, 0.1

# headings of the table of calls -> what the names of the operators contain
FUSED = {
    "rms norm": "npu_rms_norm",
    "rotary mul": "npu_rotary_mul",
    "gated unit": "glu",
    "grouped matmul": "npu_grouped_matmul",
    "fused attn": "npu_fusion_attention",
}

# float32 on both sides: sums in another order. A real device may multiply float32 matrices in less precision.
TOLERANCE = {True: 1e-5, False: 1e-2}


class CannotRunError(Exception):
    """The demo cannot run with what it was given."""


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

    def agrees(self) -> bool:
        """Tell whether a model did with kernels what its original does."""
        tolerance = TOLERANCE[softnpu.is_software()]
        launched = not softnpu.is_software() or self.calls.get("npu_rms_norm", 0) == self.norm_calls
        differences = self.logits, self.gradient, self.loss or 0.0
        close = all(difference <= tolerance for difference in differences)  # a NaN is not close
        missed = any(row.is_candidate for row in self.report) and not any(row.swapped for row in self.report)
        return close and self.same_tokens and launched and not missed


def run(checkpoint: Path | None = None) -> bool:
    """Show the tiny models, or a checkpoint, and return whether everything agreed.

    Raises:
        CannotRunError: the checkpoint cannot be loaded, or generates no text.
        UnsupportedEnvironmentError: kernels cannot be swapped in on this machine.
    """
    console = Console()
    logging.disable_progress_bar()
    kernels_ext_npu.register()
    console.print(_environment())
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is not None:
            _check(checkpoint)
            results[checkpoint.name] = _compare(checkpoint, steps=0)
        for name in track(() if checkpoint else models.MODELS, "models", console=console, transient=True):
            models.save(name, Path(folder) / name)
            results[name] = _compare(Path(folder) / name, STEPS)
    for name, result in results.items():
        console.print(f"\n[bold]{name}[/]")
        console.print(result.report)
    console.print("\nSwapped:")
    console.print(_swaps(results))
    if softnpu.is_software():
        console.print("\nCalls of a forward, and before the swap; host waits in it and in a training step:")
        console.print(_calls(results))
    console.print("\nLargest differences from the original on the CPU in float32, and of ten losses:")
    console.print(_agreement(results))
    if softnpu.is_software():
        console.print("\nThe software device computed this, no card.")
    return all(result.agrees() for result in results.values())


def _check(checkpoint: Path) -> None:
    if not (checkpoint / "config.json").is_file():
        raise CannotRunError(f"{checkpoint} is no checkpoint: a folder with config.json and weights is expected")
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CannotRunError(f"{checkpoint}: {error}") from error
    if models.loader(config) is None:
        raise CannotRunError(
            f"{checkpoint} holds a {config.model_type}: the demo runs models that generate text, with or without images"
        )


def _compare(folder: Path, steps: int) -> Result:
    """Run a model with kernels against its original, which comes first.

    A rotary function with a kernel is one object for the process, and would serve the original too.
    """
    torch.manual_seed(0)
    original = load(folder)
    made = models.inputs(original.config)
    expected, expected_tokens = logits(original, made), _tokens(original, made)
    train(original, made)
    gradients = [parameter.grad for parameter in original.parameters()]
    expected_losses = _losses(original, made, steps)

    model = load(folder, device_map="npu", use_kernels=True)
    moved = models.on("npu", made)
    report = kernels_ext_npu.report(model)
    with _count_calls(model, report) as norm_calls:
        softnpu.reset_counters()
        found = logits(model, moved)
        calls = softnpu.counters()
    apart = (found.cpu() - expected).abs().max() / expected.abs().max().clamp(min=1)
    same_tokens = torch.equal(expected_tokens, _tokens(model, moved).cpu())
    softnpu.reset_counters()
    train(model, moved)
    waits = softnpu.counters()[STREAM_SYNCS]
    gradient = gradient_difference(model, gradients)
    loss = _loss_difference(_losses(model, moved, steps), expected_losses) if steps else None

    kernels_ext_npu.restore(model.eval())
    softnpu.reset_counters()
    logits(model, moved)
    before = _operators(softnpu.counters())
    return Result(report, apart.item(), same_tokens, gradient, loss, norm_calls.total(), calls, before, waits)


def load(folder: Path, **options: Any) -> Any:
    """Load a checkpoint in float32.

    Raises:
        CannotRunError: it cannot be loaded.
    """
    auto = models.loader(AutoConfig.from_pretrained(folder, local_files_only=True))
    try:
        return auto.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise CannotRunError(f"{folder} could not be loaded: {error}") from error


@torch.no_grad()
def logits(model: Any, made: models.Inputs) -> torch.Tensor:
    """Return the logits of a forward without gradients."""
    return model(**made).logits


def _tokens(model: Any, made: models.Inputs) -> torch.Tensor:
    return model.generate(**made, max_new_tokens=NEW_TOKENS, do_sample=False)


def train(model: nn.Module, made: models.Inputs) -> None:
    """Compute the gradients of one step, without what is drawn at random: two devices draw differently."""
    model.train()
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (isinstance(module, nn.Dropout) or re.search("drop|jitter", name)):
                setattr(module, name, 0.0)
    model(**made, labels=made["input_ids"]).loss.backward()


def _losses(model: nn.Module, made: models.Inputs, steps: int) -> list[float]:
    """Train on one batch, and return the loss of each step."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**made, labels=made["input_ids"]).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
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


def gradient_difference(model: nn.Module, expected: list[torch.Tensor | None]) -> float:
    """Return the largest difference of a parameter's gradient, relative to that gradient."""
    gradients = ((a.grad, b) for a, b in zip(model.parameters(), expected))
    pairs = [(a.cpu(), b) for a, b in gradients if a is not None and b is not None]
    whole = torch.stack([b.norm() for _, b in pairs]).norm()
    # what is exactly zero in mathematics, such as the gradient of a key's bias, has a norm of rounding errors only
    return torch.stack([(a - b).norm() / b.norm().clamp(min=1e-3 * whole) for a, b in pairs]).max().item()


def _operators(counters: dict[str, int]) -> int:
    return sum(calls for name, calls in counters.items() if name not in (STREAM_SYNCS, DEVICE_TO_HOST_COPIES))


def _environment() -> Table:
    table = Table(show_header=False, box=None)
    device = torch_npu.npu.get_device_name(0)
    table.add_row("device", f"software device, as {device}" if softnpu.is_software() else device)
    table.add_row("kernels-ext-npu", kernels_ext_npu.__version__)
    for package in ("torch", "torch_npu", "transformers", "kernels"):
        table.add_row(package, version(package))
    return table


def _loss_difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference, or what is not a number, which Python's max() would lose."""
    found, exact = torch.tensor(losses), torch.tensor(expected)
    return ((found - exact).abs() / exact.abs()).max().item()


def _swaps(results: dict[str, Result]) -> Table:
    found = {row.kind for result in results.values() for row in result.report}
    kinds = [kind.in_models for kind in (*SHOWN, HEADS) if kind.in_models in found]  # all kinds would not fit
    table = _table(["attn" if kind == ATTENTION.in_models else kind for kind in kinds])
    for name, result in results.items():
        rows = [[row.swapped for row in result.report if row.kind == kind] for kind in kinds]
        table.add_row(name, *(f"{sum(swapped)} of {len(swapped)}" for swapped in rows))
    return table


def _calls(results: dict[str, Result]) -> Table:
    table = _table([*FUSED, "in all", "before", "waits", "a step"])
    for name, result in results.items():
        calls = [sum(count for op, count in result.calls.items() if part in op) for part in FUSED.values()]
        calls += [_operators(result.calls), result.operators_before, result.calls[STREAM_SYNCS], result.training_waits]
        table.add_row(name, *map(str, calls))
    return table


def _agreement(results: dict[str, Result]) -> Table:
    table = _table(["logits", "gradients", "losses", "greedy tokens", "agrees"])
    for name, result in results.items():
        tokens = "equal" if result.same_tokens else "[red]differ[/]"
        loss = "not run" if result.loss is None else f"{result.loss:.1e}"
        agrees = "[green]yes[/]" if result.agrees() else "[red]no[/]"
        table.add_row(name, f"{result.logits:.1e}", f"{result.gradient:.1e}", loss, tokens, agrees)
    return table


def _table(columns: list[str]) -> Table:
    """Make a table with a row a model; headings go down, a word a line, so that eighty characters hold them."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)
    table.add_column(no_wrap=True)
    for column in columns:
        table.add_column(column.replace(" ", "\n"), justify="right", no_wrap=True)
    return table
