"""Runs the demo: models on an NPU with kernels swapped in, against their originals on the CPU."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# transformers, torch_npu and its C++ report what is none of a reader's business here
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import softnpu  # isort: skip  before torch

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from transformers import AutoConfig, CompileConfig
from transformers.utils import logging

import kernels_ext_npu
from kernels_ext_npu.catalogue import NORMS
from kernels_ext_npu.demo import models, showing
from kernels_ext_npu.demo.results import InGraphs, Result
from kernels_ext_npu.reporting.report import Report
from softnpu.counting import STREAM_SYNCS

NEW_TOKENS = 8
STEPS, LEARNING_RATE = 10, 0.1


class CannotRunError(Exception):
    """The demo cannot run with what it was given."""


def run(checkpoint: Path | None = None) -> bool:
    """Show the tiny models, or a checkpoint, and return whether everything agreed.

    Raises:
        CannotRunError: the checkpoint cannot be loaded, or generates no text.
        UnsupportedEnvironmentError: kernels cannot be swapped in on this machine.
    """
    console = Console()
    logging.disable_progress_bar()
    kernels_ext_npu.register()
    console.print(showing.environment())
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is not None:
            _check(checkpoint)
            results[checkpoint.name] = _compare(checkpoint, steps=0)
        for name in track(() if checkpoint else models.MODELS, "models", console=console, transient=True):
            models.save(name, Path(folder) / name)
            results[name] = _compare(Path(folder) / name, STEPS, name in models.IN_GRAPHS)
    for name, result in results.items():
        console.print(f"\n[bold]{name}[/]")
        console.print(result.report)
    console.print("\nSwapped:")
    console.print(showing.swaps(results))
    if softnpu.is_software():
        console.print("\nCalls of a forward, and before the swap; host waits in it and in a training step:")
        console.print(showing.calls(results))
    console.print("\nLargest differences from the original on the CPU in float32, and of ten losses:")
    console.print(showing.agreement(results))
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


def _compare(folder: Path, steps: int, in_graphs: bool = False) -> Result:
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
    graphed = _in_graphs(model, moved, expected_tokens) if in_graphs else None
    softnpu.reset_counters()
    train(model, moved)
    waits = softnpu.counters()[STREAM_SYNCS]
    gradient = gradient_difference(model, gradients)
    loss = _loss_difference(_losses(model, moved, steps), expected_losses) if steps else None

    kernels_ext_npu.restore(model.eval())
    softnpu.reset_counters()
    logits(model, moved)
    before = showing.operators(softnpu.counters())
    return Result(report, apart.item(), same_tokens, gradient, loss, norm_calls.total(), calls, before, waits, graphed)


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


def _tokens(model: Any, made: models.Inputs, **options: Any) -> torch.Tensor:
    return model.generate(**made, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def _in_graphs(model: Any, made: models.Inputs, expected: torch.Tensor) -> InGraphs:
    softnpu.reset_counters()
    graphs = CompileConfig(backend="NPUGraph")
    found = _tokens(model, made, cache_implementation="static", compile_config=graphs).cpu()
    return InGraphs(torch.equal(found, expected), softnpu.counters().get("graph_replays", 0))


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


def _loss_difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference, or what is not a number, which Python's max() would lose."""
    found, exact = torch.tensor(losses), torch.tensor(expected)
    return ((found - exact).abs() / exact.abs()).max().item()
