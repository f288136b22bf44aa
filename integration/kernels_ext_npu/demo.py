"""The main job, shown: models on an NPU with kernels swapped in, against their originals on the CPU."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
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
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import kernels_ext_npu
from kernels_ext_npu.reporting import KINDS, Report, Row
from softnpu.counting import DEVICE_TO_HOST_COPIES, STREAM_SYNCS

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MODELS = {"Qwen3": "qwen3", "Llama": "llama", "Gemma 3": "gemma3_text", "Olmo 3": "olmo3"}
PROMPT, NEW_TOKENS = 12, 8

# float32 on both sides: sums in another order. A real device may multiply float32 matrices in less precision.
TOLERANCE = {True: 1e-5, False: 1e-2}


class CannotRunError(Exception):
    """The demo cannot run with what it was given."""


@dataclass(frozen=True)
class Result:
    """What one model showed.

    Attributes:
        report: what was swapped.
        logits: the largest difference of a logit, relative to the largest logit where that is above one.
        same_tokens: whether greedy generation gave the same tokens.
        gradient: the largest difference of a parameter's gradient, relative to that gradient.
        norm_calls: how often swapped norms were called in one forward.
        calls: operator calls of that forward, by name.
        operators_before: the number of those without kernels.
    """

    report: Report
    logits: float
    same_tokens: bool
    gradient: float
    norm_calls: int
    calls: dict[str, int]
    operators_before: int

    def operators(self) -> int:
        return _operators(self.calls)

    def swapped(self) -> int:
        return sum(row.swapped for row in self.norms())

    def norms(self) -> list[Row]:
        return [row for row in self.report if row.kind == KINDS["RMSNorm"]]

    def agrees(self) -> bool:
        tolerance = TOLERANCE[softnpu.is_software()]
        launched = not softnpu.is_software() or self.calls.get("npu_rms_norm", 0) == self.norm_calls
        close = all(difference <= tolerance for difference in (self.logits, self.gradient))  # a NaN is not close
        missed = self.swapped() == 0 and any(row.is_candidate for row in self.report)
        return close and self.same_tokens and launched and not missed


def run(checkpoint: Path | None = None) -> bool:
    """Show the tiny models, or a checkpoint; returns whether everything agreed."""
    console = Console()
    logging.disable_progress_bar()
    kernels_ext_npu.register()
    console.print(_environment())
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is not None:
            _check(checkpoint)
            results[checkpoint.name] = _compare(checkpoint)
        for name in track(() if checkpoint else MODELS, "models", console=console, transient=True):
            results[name] = _compare(_save(MODELS[name], Path(folder) / MODELS[name]))
    for name, result in results.items():
        console.print(f"\n[bold]{name}[/]")
        console.print(result.report)
    console.print("\nEach against its original on the CPU, in float32:")
    console.print(_summary(results))
    if softnpu.is_software():
        console.print("Calls and waits are those of one forward. The software device computed it, no card.")
    return all(result.agrees() for result in results.values())


def _check(checkpoint: Path) -> None:
    if not (checkpoint / "config.json").is_file():
        raise CannotRunError(f"{checkpoint} is no checkpoint: a folder with config.json and weights is expected")
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CannotRunError(f"{checkpoint}: {error}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise CannotRunError(f"{checkpoint} holds a {config.model_type}: the demo runs causal language models")


def _save(model_type: str, folder: Path) -> Path:
    """A tiny random model whose norms have weights of their own: ones would hide a norm that ignores them."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def _compare(folder: Path) -> Result:
    torch.manual_seed(0)
    original = _load(folder)
    model = _load(folder, device_map="npu", use_kernels=True)
    ids = torch.randint(2, original.config.get_text_config().vocab_size, (2, PROMPT))
    report = kernels_ext_npu.report(model)

    with torch.no_grad(), _count_calls(model, report) as norm_calls:
        expected = original(ids).logits
        softnpu.reset_counters()
        found = model(ids.to("npu")).logits
        calls = softnpu.counters()
    logits = (found.cpu() - expected).abs().max() / expected.abs().max().clamp(min=1)

    same_tokens = torch.equal(_generate(original, ids), _generate(model, ids.to("npu")).cpu())
    gradient = _gradient_difference(original, model, ids)

    kernels_ext_npu.restore(model.eval())
    with torch.no_grad():
        softnpu.reset_counters()
        model(ids.to("npu"))
        before = _operators(softnpu.counters())
    return Result(report, logits.item(), same_tokens, gradient, norm_calls.total(), calls, before)


def _load(folder: Path, **options: Any) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise CannotRunError(f"{folder} could not be loaded: {error}") from error


def _generate(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)


@contextmanager
def _count_calls(model: nn.Module, report: Report) -> Iterator[Counter[str]]:
    calls: Counter[str] = Counter()
    paths = [row.path for row in report if row.swapped and row.kind == KINDS["RMSNorm"]]
    hooks = [
        model.get_submodule(path).register_forward_pre_hook(lambda *_, path=path: calls.update([path]))
        for path in paths
    ]
    yield calls
    for hook in hooks:
        hook.remove()


def _gradient_difference(original: Any, model: Any, ids: torch.Tensor) -> float:
    for module, device in ((original, "cpu"), (model, "npu")):
        _without_chance(module.train())
        moved = ids.to(device)
        module(moved, labels=moved).loss.backward()
    pairs = [(a.grad.cpu(), b.grad) for a, b in zip(model.parameters(), original.parameters()) if b.grad is not None]
    whole = torch.stack([b.norm() for _, b in pairs]).norm()
    # what is exactly zero in mathematics, such as the gradient of a key's bias, has a norm of rounding errors only
    return torch.stack([(a - b).norm() / b.norm().clamp(min=1e-3 * whole) for a, b in pairs]).max().item()


def _without_chance(model: nn.Module) -> None:
    """Turn off what is drawn at random in training: two devices draw differently."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (isinstance(module, nn.Dropout) or re.search("drop|jitter", name)):
                setattr(module, name, 0.0)


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


def _calls_of(name: str, result: Result) -> str:
    return str(result.calls.get(name, 0))


def _summary(results: dict[str, Result]) -> Table:
    """A column a model: eighty characters hold it."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column(no_wrap=True)
    for name in results:
        table.add_column(name, justify="right")

    def row(label: str, show: Callable[[Result], str]) -> None:
        table.add_row(label, *(show(result) for result in results.values()))

    row("norms swapped", lambda result: f"{result.swapped()} of {len(result.norms())}")
    if softnpu.is_software():
        fused = sorted({name for result in results.values() for name in result.calls if name.startswith("npu_")})
        for name in fused:
            row(f"calls of {name}", partial(_calls_of, name))
        row("calls of any operator", lambda result: str(result.operators()))
        row("the same without kernels", lambda result: str(result.operators_before))
        row("host waits", lambda result: str(result.calls[STREAM_SYNCS]))
    row("largest logits difference", lambda result: f"{result.logits:.1e}")
    row("tokens of greedy generation", lambda result: "equal" if result.same_tokens else "[red]differ[/]")
    row("largest gradient difference", lambda result: f"{result.gradient:.1e}")
    row("agrees with its original", lambda result: "[green]yes[/]" if result.agrees() else "[red]no[/]")
    return table
