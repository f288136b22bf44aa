"""What a way to save and load is, and how one is made of a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn


class Way(NamedTuple):
    """One way to save a model of some kinds to an empty folder, and to load it from there.

    To load gives the model or the state dict that was loaded, or anything else where the fresh model holds it then.
    """

    save: Callable[[Any, Path], object]
    load: Callable[[Any, Path], Any]
    kinds: tuple[str, ...] = ("dense", "experts")


def from_state_dict(
    write: Callable[[dict[str, Tensor], Path], object], read: Callable[[Path], Mapping[str, Tensor]]
) -> Way:
    """Return the way that writes a state dict into a folder, and reads it, whole, from there."""
    return Way(lambda model, folder: write(model.state_dict(), folder), lambda fresh, folder: into(fresh, read(folder)))


def into(fresh: nn.Module, state: Mapping[str, Tensor], **options: Any) -> nn.Module:
    """Load a state dict into a model, of which nothing may be missing."""
    fresh.load_state_dict(state, **options)
    return fresh
