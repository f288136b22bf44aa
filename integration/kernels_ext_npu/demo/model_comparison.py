"""The models of the demo, tiny random ones, and the comparison of one with kernels on the NPU with its original."""

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
from transformers import CONFIG_MAPPING, AutoConfig, CompileConfig, PreTrainedConfig

import kernels_ext_npu
import softnpu
from kernels_ext_npu import model_configs
from kernels_ext_npu.catalogue import NORMS
from kernels_ext_npu.demo.tiny_checkpoints import loader, random_model
from kernels_ext_npu.environment import RefusedError
from kernels_ext_npu.measuring.costs import host_waits
from kernels_ext_npu.measuring.distance import distance, distances, models_agree, worst
from kernels_ext_npu.reporting.report import Report
from softnpu.counting import DEVICE_TO_HOST_COPIES, STREAM_SYNCS

Inputs = dict[str, Tensor]

_PROMPT, _IMAGE = 12, 99
IN_GRAPHS = {"Qwen3", "gpt-oss"}  # that generate a second time, with one launch for the forward of a token


def save(name: str, folder: Path) -> None:
    """Save a tiny random model."""
    random_model(model_configs.config(name)).save_pretrained(folder)


def inputs(config: Any) -> Inputs:
    """Make a prompt of two rows; in the demo's own vision-language model it has an image in each of them."""
    text = config.get_text_config()
    ids = torch.randint(2, min(text.vocab_size, 90), (2, _PROMPT))
    vision = getattr(config, "vision_config", None)
    if vision is None or config.image_token_id != _IMAGE or vision.hidden_size != 32:
        return {"input_ids": ids}
    grid = torch.tensor([[1, 4, 4]] * 2)
    patches = torch.randn(2 * 16, 3 * vision.temporal_patch_size * vision.patch_size**2)
    ids[:, 3:7] = _IMAGE  # four patches make a token
    kinds = (ids == _IMAGE).long()
    return {"input_ids": ids, "mm_token_type_ids": kinds, "pixel_values": patches, "image_grid_thw": grid}


NEW_TOKENS = 8
LEARNING_RATE = 0.1
_NORM_OPERATORS = "npu_rms_norm", "npu_gemma_rms_norm"


@dataclass(frozen=True)
class Result:
    """What was found out about one model."""

    report: Report  # what was swapped
    logits: float  # the largest difference of a logit, relative to the largest logit
    same_tokens: bool  # whether greedy generation gave the same tokens
    gradient: float  # the largest difference of a parameter's gradient, relative to that gradient
    loss: float | None  # the largest relative difference of a loss in ten steps of training, None where there were none
    norm_calls: int  # how often swapped norms were called in one forward
    calls: dict[str, int]  # operator calls of that forward, by name
    operators_before: int  # the number of those without kernels
    waits: tuple[int, int]  # how often the host waited in that forward, and in a forward and backward
    same_in_graphs: bool | None = None  # whether the same generation in graphs gave them too, None where it was not run
    replays: int = 0  # how many tokens of it were one launch each for the forward; of a card nobody counts them

    def agrees(self) -> bool:
        """Tell whether a model did with kernels what its original does."""
        launched = sum(self.calls.get(name, 0) for name in _NORM_OPERATORS) == self.norm_calls
        missed = any(row.is_candidate for row in self.report) and not any(row.swapped for row in self.report)
        close = models_agree(self.logits, self.gradient, self.loss or 0.0)
        same = self.same_tokens and self.same_in_graphs is not False
        return close and same and (launched or not softnpu.is_software()) and not missed


def compare(folder: Path, steps: int, in_graphs: bool = False, trust_remote_code: bool = False) -> Result:
    """Run a model with kernels against its original, which comes first.

    A rotary function with a kernel is one object for the process, and would serve the original too.

    Args:
        folder: the checkpoint.
        steps: of training; none for a model that is not to be changed.
        in_graphs: whether it generates a second time, with one launch for the forward of a token.
        trust_remote_code: whether code that the checkpoint brings may run.
    """
    torch.manual_seed(0)
    original = load(folder, trust_remote_code)
    made = inputs(original.config)
    expected, expected_tokens = logits(original, made), _tokens(original, made)
    expected_gradients = gradients(original, made)
    expected_losses = _losses(original, made, steps)

    model = load(folder, trust_remote_code, device_map="npu", use_kernels=True)
    moved = {name: value.to("npu") for name, value in made.items()}
    report = kernels_ext_npu.report(model)
    same_tokens = torch.equal(expected_tokens, _tokens(model, moved).cpu())
    softnpu.reset_counters()
    with _count_calls(model, report) as norm_calls, host_waits() as in_forward:
        found = logits(model, moved)
    calls = softnpu.counters()
    same_in_graphs, replays = None, 0
    if in_graphs:
        softnpu.reset_counters()
        graphs = {"cache_implementation": "static", "compile_config": CompileConfig(backend="NPUGraph")}
        same_in_graphs = torch.equal(expected_tokens, _tokens(model, moved, **graphs).cpu())
        replays = softnpu.counters().get("graph_replays", 0)
    with host_waits() as in_step:
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
        same_in_graphs=same_in_graphs,
        replays=replays,
    )


def load(folder: Path, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load a checkpoint in float32; refuse one that cannot be loaded, generates no text, or has code not to be run."""
    if not (folder / "config.json").is_file():
        raise RefusedError(f"{folder} is no checkpoint: a folder with config.json and weights is expected")
    try:
        local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        described, _ = PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        if "auto_map" in described and described.get("model_type") not in CONFIG_MAPPING and not trust_remote_code:
            raise RefusedError(f"{folder} brings its own code: with --trust-remote-code that is run")
        config = AutoConfig.from_pretrained(folder, **local)
        if (auto := loader(config)) is not None:
            return auto.from_pretrained(folder, dtype=torch.float32, **local, **options)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{folder} could not be loaded: {error}") from error
    raise RefusedError(
        f"{folder} holds a {config.model_type}: the demo runs models that generate text, with or without images"
    )


@torch.no_grad()
def logits(model: Any, made: Inputs) -> Tensor:
    """Return the logits of a forward without gradients."""
    return model(**made).logits


def gradients(model: nn.Module, made: Inputs) -> dict[str, Tensor | None]:
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


def _tokens(model: Any, made: Inputs, **options: Any) -> Tensor:
    return model.generate(**made, max_new_tokens=NEW_TOKENS, do_sample=False, **options)


def _losses(model: nn.Module, made: Inputs, steps: int) -> dict[str, Tensor]:
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
