"""What of the installed transformers has a kernel, by the kinds of the catalogue."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from kernels_ext_npu.catalogue import ATTENTION, IMPLEMENTATION, ROTARY, Kind, Repository
from kernels_ext_npu.coverage import model_types
from kernels_ext_npu.coverage.model_types import Folder
from kernels_ext_npu.matching import classification
from kernels_ext_npu.matching.decorated import original_function
from kernels_ext_npu.matching.lookup import find_function_pattern, find_pattern
from kernels_ext_npu.reasons import Reason

Track = Callable[[Sequence[Folder]], Iterable[Folder]]
SHARED = Folder("activations", (), ("transformers.activations",))  # what models of every type may have


@dataclass(frozen=True)
class Entry:
    """A class or function of transformers.

    Attributes:
        kind: what it is counted among.
        name: its name; that of a method follows its class's.
        file: the modeling file that it is in, without ``modeling_`` and ``.py``.
        layer: the layer that serves it; for attention the implementation; for a gated MLP those between which the
            activation of an instance decides.
        reason: why no layer serves it; None if one does.
    """

    kind: str
    name: str
    file: str
    layer: str | None
    reason: Reason | None


@dataclass(frozen=True)
class Row:
    """What is in a folder of transformers.

    Attributes:
        folder: the folder and its model types.
        entries: what is of a kind that is counted.
        parts: the model types of other folders that its models are made of, unless a config names others.
        missing: why what was not imported was not, by file.
    """

    folder: Folder
    entries: tuple[Entry, ...]
    parts: tuple[str, ...]
    missing: dict[str, str]

    def of(self, repository: Repository) -> list[Entry]:
        """Return what is counted for the kernels of a repository."""
        return [entry for kind in repository.kinds for entry in self.entries if entry.kind == kind.name]


def survey(folders: Sequence[Folder] | None = None, track: Track = iter) -> list[Row]:
    """Read the modeling files of some folders, or of all, and return a row for each.

    Args:
        folders: those to read, of model_types.folders(); by default all of them, and what their models share, whose row
            has no model types.
        track: what the folders go through, such as a progress bar.
    """
    with _quiet():
        return [_row(folder) for folder in track([*model_types.folders(), SHARED] if folders is None else folders)]


def entries(module: ModuleType) -> Iterator[Entry]:
    """Find what a modeling file defines that is counted."""
    file = _short(module)
    for cls in classes_of(module):
        kind, reference = classification.of_class(cls), find_pattern(cls)
        if kind is ATTENTION:
            refusal = classification.attention_refusal(cls)
            yield Entry(kind.name, cls.__name__, file, None if refusal else IMPLEMENTATION, refusal)
        elif kind is not None:
            layer = " or ".join(reference.layers) if reference else None
            reason = None if layer else classification.reason(kind, cls.__name__)
            yield Entry(kind.name, cls.__name__, file, layer, reason)
        for method in classification.rotary_methods(cls):
            name = f"{cls.__name__}.{method}"
            yield Entry(ROTARY.name, name, file, None, classification.reason(ROTARY, f"{file}:{name}"))
    for name, function, kind in functions_of(module):
        found = find_function_pattern(function)
        reason = None if found else classification.reason(kind, f"{file}:{name}")
        yield Entry(kind.name, name, file, found.layer if found else None, reason)


def _row(folder: Folder) -> Row:
    loaded = {file: model_types.load(file) for file in folder.files}
    found = [entry for module in loaded.values() if isinstance(module, ModuleType) for entry in entries(module)]
    missing = {file.split(".")[-1] + ".py": why for file, why in loaded.items() if isinstance(why, str)}
    return Row(folder, tuple(found), model_types.parts(folder), missing)


def classes_of(module: ModuleType) -> Iterator[type[nn.Module]]:
    """Find the classes of modules that a file defines."""
    for value in dict.fromkeys(value for value in vars(module).values() if inspect.isclass(value)):
        if issubclass(value, nn.Module) and _is_defined_in(value, module):
            yield value


def functions_of(module: ModuleType) -> Iterator[tuple[str, object, Kind]]:
    """Find the functions of a file that models call and that are counted, each with what it is.

    Helpers and what a served function is made of are not among them: the report of a model knows them by what calls
    them.
    """
    named = {n: value for n, value in vars(module).items() if _is_defined_in(original_function(value), module)}
    served = {name for name, value in named.items() if find_function_pattern(value) is not None}
    inside = set().union(*(classification.names(original_function(named[name])) for name in served))
    for name, value in named.items():
        kind = classification.of_function(name, value)
        if kind is not None and (name in served or (name not in inside and not classification.is_helper(name))):
            yield name, value, kind


def _is_defined_in(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


def _short(module: ModuleType) -> str:
    return module.__name__.rpartition("modeling_")[2]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what packages complain about while everything is imported and every config is made.

    None of it matters here.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
