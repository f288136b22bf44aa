"""Acts that save a model and go on with what was loaded: whole, as a state dict, by each library."""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import accelerate
import torch
from huggingface_hub import load_torch_model, save_torch_model
from safetensors.torch import load_file, load_model, save_file, save_model

from tests.support.programs.acts.kernels import has_others_where_it_is
from tests.support.programs.acts.weights import members
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side


def _path(side: Side, name: str = "") -> Path:
    side.held["files"] = side.held.get("files", 0) + 1
    return side.folder / f"{side.held['files']}{name}"


@act()
def save_and_load_the_whole_model(side: Side, choice: Random) -> None:
    """The twin is copied: see pickle_it. Its tensors share memory afterwards as they do in a file."""
    side.held["forwards of then"] = not side.is_registered  # docs/served.md
    path = _path(side)
    torch.save(members(side.model) if side.home == "cpu" else side.model, path)
    if side.home == "cpu":
        side.model = copy.deepcopy(side.model)
        for tensor, loaded in zip(members(side.model).values(), torch.load(path).values(), strict=True):
            tensor.data = loaded.data
    else:
        side.model = torch.load(path, weights_only=False)


@act()
def save_and_load_a_state_dict(side: Side, choice: Random) -> None:
    """By torch or by safetensors, copied or assigned."""
    path, state = _path(side), side.model.state_dict()
    if choice.random() < 0.5:
        torch.save(state, path)
        loaded = torch.load(path)
    else:
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
        loaded = load_file(path, device=str(side.device))
    side.model.load_state_dict(loaded, assign=choice.random() < 0.5)


def _by_library(save: Callable[[Any, str], object], load: Callable[[Any, str], object]) -> Callable:
    def run(side: Side, choice: Random) -> None:
        path = str(_path(side))
        save(side.model, path)
        load(side.model, path)

    return run


acts(
    save_and_load_by_model=_by_library(save_model, load_model),
    save_and_load_by_hub=_by_library(save_torch_model, partial(load_torch_model, strict=False)),
)


def _load_by_pretrained(side: Side, use_kernels: bool) -> None:
    folder, model = _path(side), side.pretrained
    is_training, dtype = model.training, next(model.parameters()).dtype
    model.save_pretrained(folder)
    options: dict[str, Any] = {"use_kernels": True} if use_kernels and side.has_kernels else {}
    if side.is_experts and side.home == "cpu":
        options["experts_implementation"] = "eager"
    device = str(side.device)
    side.model = type(model).from_pretrained(folder, device_map=device, dtype=dtype, **options).train(is_training)


def is_unchanged(side: Side) -> bool:
    """Tell whether a new model of the config would have the same parts.

    Of weights that share memory, unless the config ties them, one is saved, and the others are drawn when it is loaded.
    """
    return not side.is_adapted and list(side.model.state_dict()) == side.names and side.count_places() == side.places


acts(is_unchanged, save_and_load_by_pretrained=lambda side, choice: _load_by_pretrained(side, use_kernels=False))


@act(lambda side: is_unchanged(side) and side.is_registered and not has_others_where_it_is(side))
def save_and_load_by_pretrained_with_kernels(side: Side, choice: Random) -> None:
    side.asked = True
    _load_by_pretrained(side, use_kernels=True)


@act()
def save_and_load_by_accelerate(side: Side, choice: Random) -> None:
    folder, reset = _path(side), partial(accelerate.state.AcceleratorState._reset_state, reset_partial_state=True)
    reset()
    side.cleanups.append(reset)
    accelerator = accelerate.Accelerator(cpu=side.device.type == "cpu")
    prepared = accelerator.prepare_model(side.model)
    accelerator.save_state(str(folder), safe_serialization=choice.random() < 0.5)
    accelerator.load_state(str(folder))
    accelerator.free_memory()
    side.model = accelerator.unwrap_model(prepared)
