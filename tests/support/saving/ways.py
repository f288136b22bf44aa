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
    """One way to save a model of some kinds and load it again, with the public names that it goes through.

    It saves to an empty folder, and gives what loads from there.
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


def add(
    name: str, save: Callable[[Any, Path], object], load: Callable[[Any, Path], Any], *names: str, **options: Any
) -> None:
    """Add a way of two functions: of a model and a folder, and of a fresh model and the folder."""

    def saving(model: nn.Module, folder: Path) -> Loading:
        save(model, folder)
        return lambda fresh: load(fresh, folder)

    saving.__name__ = name
    way(*names, **options)(saving)


def add_of_state(
    name: str,
    write: Callable[[dict[str, Tensor], Path], object],
    read: Callable[[Path], Mapping[str, Tensor]],
    *names: str,
) -> None:
    """Add a way that writes a state dict into a folder, and reads it, whole, from there."""
    save, load = (
        lambda model, folder: write(model.state_dict(), folder),
        lambda fresh, folder: into(fresh, read(folder)),
    )
    add(name, save, load, *names)


def into(fresh: nn.Module, state: Mapping[str, Tensor], **options: Any) -> nn.Module:
    """Load a state dict into a model, of which nothing may be missing."""
    fresh.load_state_dict(state, **options)
    return fresh
