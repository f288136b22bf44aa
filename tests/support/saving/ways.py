"""The list of ways to save and load, which each file of ways adds to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

# a fresh model -> the model or the state dict that was loaded; anything else where the fresh model holds it
Loading = Callable[[nn.Module], Any]
Saving = Callable[[Any, Path], Loading]

WAYS: dict[str, Way] = {}


@dataclass(frozen=True)
class Way:
    """One way to save a model of some kinds to an empty folder, which gives what loads it from there."""

    save: Saving
    kinds: tuple[str, ...]


def way(kinds: tuple[str, ...] = ("dense", "experts")) -> Callable[[Saving], Saving]:
    """Add a function to the ways, under its own name."""

    def add(save: Saving) -> Saving:
        assert save.__name__ not in WAYS
        WAYS[save.__name__] = Way(save, kinds)
        return save

    return add


def add(name: str, save: Callable[[Any, Path], object], load: Callable[[Any, Path], Any], **options: Any) -> None:
    """Add a way of two functions: of a model and a folder, and of a fresh model and the folder."""

    def saving(model: nn.Module, folder: Path) -> Loading:
        save(model, folder)
        return lambda fresh: load(fresh, folder)

    saving.__name__ = name
    way(**options)(saving)


def add_of_state(
    name: str, write: Callable[[dict[str, Tensor], Path], object], read: Callable[[Path], Mapping[str, Tensor]]
) -> None:
    """Add a way that writes a state dict into a folder, and reads it, whole, from there."""
    add(
        name,
        lambda model, folder: write(model.state_dict(), folder),
        lambda fresh, folder: into(fresh, read(folder)),
    )


def into(fresh: nn.Module, state: Mapping[str, Tensor], **options: Any) -> nn.Module:
    """Load a state dict into a model, of which nothing may be missing."""
    fresh.load_state_dict(state, **options)
    return fresh
