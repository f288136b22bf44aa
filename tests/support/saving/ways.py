"""The list of ways to save and load, which each file of ways adds to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

Loading = Callable[[nn.Module], Any]  # a fresh model -> the model that holds what was saved, or its state dict
Saving = Callable[[Any, Path], Loading]

WAYS: dict[str, Way] = {}


@dataclass(frozen=True)
class Way:
    """One way to save a model and load it again.

    Attributes:
        save: takes a model and an empty folder, writes the one into the other, and returns what loads it.
        names: the public names that it goes through.
        kinds: the models that it can save.
    """

    save: Saving
    names: tuple[str, ...]
    kinds: tuple[str, ...]


def way(*names: str, kinds: tuple[str, ...] = ("dense", "experts")) -> Callable[[Saving], Saving]:
    """Add a function to the ways, under its own name."""

    def add(save: Saving) -> Saving:
        assert save.__name__ not in WAYS
        WAYS[save.__name__] = Way(save, names, kinds)
        return save

    return add


def into(fresh: nn.Module, state: Mapping[str, Tensor], **options: Any) -> nn.Module:
    """Load a state dict into a model, of which nothing may be missing."""
    fresh.load_state_dict(state, **options)
    return fresh


def then(load: Callable[[nn.Module], object]) -> Loading:
    """Load by what changes a fresh model, whatever it returns."""

    def loading(fresh: nn.Module) -> nn.Module:
        load(fresh)
        return fresh

    return loading
