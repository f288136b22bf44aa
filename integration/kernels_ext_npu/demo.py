"""The main job, shown: models on an NPU with kernels swapped in, against their originals on the CPU."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

# transformers, torch_npu and its C++ report what is none of a reader's business here
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import softnpu  # isort: skip  before torch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import kernels_ext_npu
from kernels_ext_npu.reporting import Report
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
        report: which norms were swapped.
        logits: the largest difference of a logit, relative to the largest logit where that is above one.
        same_tokens: whether greedy generation gave the same tokens.
        gradient: the largest difference of a parameter's gradient, relative to the norm of the whole gradient.
        calls: operator calls of one forward, by name, with kernels.
        calls_before: their number without kernels.
    """

    report: Report
    logits: float
    same_tokens: bool
    gradient: float
    calls: dict[str, int]
    calls_before: int

    def operators(self) -> int:
        return _operators(self.calls)

    def agrees(self) -> bool:
        tolerance = TOLERANCE[softnpu.is_software()]
        swapped = sum(row.swapped for row in self.report)
        launched = not softnpu.is_software() or self.calls.get("npu_rms_norm", 0) == swapped
        return self.same_tokens and max(self.logits, self.gradient) <= tolerance and swapped > 0 and launched


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
    console.print()
    console.print(_summary(results))
    if softnpu.is_software():
        console.print(
            "Computed on the software device: by the formulas of its operators, at a speed that says nothing."
        )
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
    original = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="npu", use_kernels=True)
    ids = torch.randint(2, original.config.get_text_config().vocab_size, (2, PROMPT))
    report = kernels_ext_npu.report(model)

    with torch.no_grad():
        expected = original(ids).logits
        softnpu.reset_counters()
        found = model(ids.to("npu")).logits
        calls = softnpu.counters()
    logits = (found.cpu() - expected).abs().max() / expected.abs().max().clamp(min=1)

    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    tokens = original.generate(ids, **options), model.generate(ids.to("npu"), **options).cpu()
    gradient = _gradient_difference(original, model, ids)

    kernels_ext_npu.restore(model.eval())
    with torch.no_grad():
        softnpu.reset_counters()
        model(ids.to("npu"))
        before = _operators(softnpu.counters())
    return Result(report, logits.item(), torch.equal(*tokens), gradient, calls, before)


def _gradient_difference(original: nn.Module, model: nn.Module, ids: torch.Tensor) -> float:
    for module, device in ((original, "cpu"), (model, "npu")):
        module.train()
        moved = ids.to(device)
        module(moved, labels=moved).loss.backward()
    pairs = [(a.grad.cpu(), b.grad) for a, b in zip(model.parameters(), original.parameters()) if b.grad is not None]
    whole = torch.stack([b.norm() for _, b in pairs]).norm()
    return max(((a - b).norm() / whole).item() for a, b in pairs)


def _operators(counters: dict[str, int]) -> int:
    return sum(calls for name, calls in counters.items() if name not in (STREAM_SYNCS, DEVICE_TO_HOST_COPIES))


def _environment() -> Table:
    table = Table(show_header=False, box=None)
    device = torch.npu.get_device_name(0)
    table.add_row("device", f"software device, as {device}" if softnpu.is_software() else device)
    table.add_row("kernels-ext-npu", kernels_ext_npu.__version__)
    for package in ("torch", "torch_npu", "transformers", "kernels"):
        table.add_row(package, version(package))
    return table


def _summary(results: dict[str, Result]) -> Table:
    table = Table(title="against the original on the CPU, in float32", title_justify="left")
    counted = ("npu_rms_norm\na forward", "operators\na forward", "host\nwaits") if softnpu.is_software() else ()
    table.add_column("model")
    for column in ("norms\nswapped", *counted, "logits", "tokens", "gradients"):
        table.add_column(column, justify="right")
    table.add_column("")
    for name, result in results.items():
        swapped = sum(row.swapped for row in result.report)
        operators = f"{result.calls_before} → {result.operators()}"
        counts = [str(result.calls.get("npu_rms_norm", 0)), operators, str(result.calls["stream_syncs"])]
        table.add_row(
            name,
            f"{swapped} of {len(result.report)}",
            *(counts if counted else ()),
            f"{result.logits:.1e}",
            "equal" if result.same_tokens else "[red]differ[/]",
            f"{result.gradient:.1e}",
            "[green]agrees[/]" if result.agrees() else "[red]disagrees[/]",
        )
    return table
