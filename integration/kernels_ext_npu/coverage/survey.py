"""Survey which classes and functions of transformers have a kernel, by kinds of the catalogue and model types.

transformers has a folder for the model types of a family, and says itself which: qwen3_vl, qwen3_vl_text and
qwen3_vl_vision are in models/qwen3_vl. What is in the files of a folder belongs to all of its types. A model type whose
folder has no modeling file is in the folder of the class that the auto classes make for it: gpt-sw3 is in models/gpt2.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import transformers
import transformers.models
from torch import nn
from transformers.models.auto import AutoConfig, modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

from kernels_ext_npu.catalogue import ATTENTION, IMPLEMENTATION, INDEXERS, ROTARY, Kind, Repository
from kernels_ext_npu.environment import RefusedError
from kernels_ext_npu.matching import classification
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.transformers_internals import original_function

UNNAMED = "what its config names"  # for parts that have no default


@dataclass(frozen=True)
class Folder:
    """A folder of transformers with its model types."""

    name: str  # the name of the folder, below models/
    model_types: tuple[str, ...]  # the model types as a config.json names them
    files: tuple[str, ...]  # its modeling files, as modules to import


@cache
def all_folders() -> tuple[Folder, ...]:
    """Return all folders that have a model type, sorted by name."""
    named: dict[str, list[str]] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        named.setdefault(model_type_to_module_name(model_type), []).append(model_type)
    found: dict[str, list[str]] = {}
    for name, types in named.items():
        found.setdefault(name if _files(name) else _made_in(types) or name, []).extend(types)
    return tuple(Folder(name, tuple(sorted(types)), _files(name)) for name, types in sorted(found.items()))


def find(model_types: Iterable[str]) -> list[Folder]:
    """Find the folders of these model types, in their order; refuse one that is none, and say what is nearly so."""
    found: dict[Folder, None] = {}
    for model_type in model_types:
        folder = next((folder for folder in all_folders() if model_type in folder.model_types), None)
        if folder is None:
            near = difflib.get_close_matches(model_type.lower().replace("-", "_"), CONFIG_MAPPING_NAMES, n=4)
            hint = f"did you mean {' or '.join(near)}?" if near else "`kernels-ext-npu coverage` lists all."
            raise RefusedError(
                f"transformers {transformers.__version__} has no model type {model_type}, which is the model_type of a "
                f"config.json: {hint}"
            )
        found[folder] = None
    return list(found)


def parts(folder: Folder) -> tuple[str, ...]:
    """Return the model types of other folders that its models are made of, unless a config names others."""
    found: dict[str, None] = {}
    for model_type in folder.model_types:
        config_class = CONFIG_MAPPING[model_type]
        names = [name for name, declared in config_class.sub_configs.items() if declared is AutoConfig]
        try:
            config = config_class() if names else None
        except Exception:  # there are configs that cannot be made without arguments
            found[UNNAMED] = None
            continue
        made = (getattr(getattr(config, name, None), "model_type", "") for name in names)
        found |= dict.fromkeys(part for part in made if part in CONFIG_MAPPING_NAMES)
    return tuple(part for part in found if part not in folder.model_types)


def load(file: str) -> ModuleType | str:
    """Import a modeling file, and return it, or why it cannot be imported."""
    try:
        return importlib.import_module(file)
    except ModuleNotFoundError as error:
        return f"needs {error.name}, which is not installed"
    except Exception as error:  # whatever the packages that it needs come up with
        return f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _made_in(types: list[str]) -> str | None:
    """Find the folder of what the auto classes make for one of these model types; None if they make nothing."""
    mappings = [names for key, names in vars(modeling_auto).items() if key.startswith("MODEL_") and "_NAMES" in key]
    made = [names[model_type] for model_type in types for names in mappings if model_type in names]
    for class_name in (name for names in made for name in ((names,) if isinstance(names, str) else names)):
        with suppress(Exception):  # a file that cannot be imported
            return getattr(transformers, class_name).__module__.split(".")[-2]
    return None


@cache
def _files(folder: str) -> tuple[str, ...]:
    paths = sorted((Path(transformers.models.__path__[0]) / folder.replace(".", "/")).glob("modeling_*.py"))
    return tuple(f"transformers.models.{folder}.{path.stem}" for path in paths)


Track = Callable[[Sequence[Folder]], Iterable[Folder]]
SHARED = Folder("activations", (), ("transformers.activations",))  # what models of every type may have


@dataclass(frozen=True)
class Entry:
    """A class or function of transformers."""

    kind: str  # what it is counted among
    name: str  # its name; that of a method follows its class's
    file: str  # the modeling file that it is in, without ``modeling_`` and ``.py``
    # the layer that serves it; for attention the implementation; for a gated MLP those between which the
    # activation of an instance decides
    layer: str | None
    reason: Reason | None  # why no layer serves it; None if one does


@dataclass(frozen=True)
class Row:
    """The survey of one folder of transformers."""

    folder: Folder  # the folder and its model types
    entries: tuple[Entry, ...]  # what is of a kind that is counted
    parts: tuple[str, ...]  # the model types of other folders that its models are made of, unless a config names others
    missing: dict[str, str]  # why what was not imported was not, by file

    def entries_for(self, repository: Repository) -> list[Entry]:
        """Return what is counted for the kernels of a repository."""
        return [entry for kind in repository.kinds for entry in self.entries if entry.kind == kind.name]


def survey(folders: Sequence[Folder] | None = None, track: Track = iter) -> list[Row]:
    """Read the modeling files of some folders, or of all, and return a row for each.

    Args:
        folders: those to read, of `all_folders`; by default all of them, and what their models share, whose row
            has no model types.
        track: what the folders go through, such as a progress bar.
    """
    with _quiet():
        return [_row(folder) for folder in track([*all_folders(), SHARED] if folders is None else folders)]


def entries(module: ModuleType) -> Iterator[Entry]:
    """Find what a modeling file defines that is counted."""
    file = module.__name__.rpartition("modeling_")[2]
    for cls in classes_in(module):
        kind, reference = classification.classify_class(cls), find_pattern(cls)
        if kind in (ATTENTION, INDEXERS):
            refuse = classification.attention_refusal if kind is ATTENTION else classification.indexer_refusal
            refusal = refuse(cls)
            yield Entry(kind.name, cls.__name__, file, None if refusal else IMPLEMENTATION, refusal)
        elif kind is not None:
            layer = " or ".join(reference.layers) if reference else None
            reason = None if layer else classification.reason(kind, cls.__name__)
            yield Entry(kind.name, cls.__name__, file, layer, reason)
        for method in classification.rotary_methods(cls):
            name = f"{cls.__name__}.{method}"
            yield Entry(ROTARY.name, name, file, None, classification.reason(ROTARY, f"{file}:{name}"))
    for name, function, kind in functions_in(module):
        found = find_pattern(function)
        reason = None if found else classification.reason(kind, f"{file}:{name}")
        yield Entry(kind.name, name, file, found.layers[0] if found else None, reason)


def _row(folder: Folder) -> Row:
    loaded = {file: load(file) for file in folder.files}
    found = [entry for module in loaded.values() if isinstance(module, ModuleType) for entry in entries(module)]
    missing = {file.split(".")[-1] + ".py": why for file, why in loaded.items() if isinstance(why, str)}
    return Row(folder, tuple(found), parts(folder), missing)


def classes_in(module: ModuleType) -> Iterator[type[nn.Module]]:
    """Find the classes of modules that a file defines."""
    for value in dict.fromkeys(value for value in vars(module).values() if inspect.isclass(value)):
        if issubclass(value, nn.Module) and _is_defined_in(value, module):
            yield value


def functions_in(module: ModuleType) -> Iterator[tuple[str, object, Kind]]:
    """Find the functions of a file that models call and that are counted, each with what it is.

    Helpers and what a served function is made of are not among them: the report of a model knows them by what calls
    them.
    """
    named = {n: value for n, value in vars(module).items() if _is_defined_in(original_function(value), module)}
    served = {name for name, value in named.items() if find_pattern(value) is not None}
    inside = set().union(*(classification.referenced_names(original_function(named[name])) for name in served))
    for name, value in named.items():
        kind = classification.classify_function(name, value)
        is_part = name in inside or name.startswith(classification.HELPERS)
        if kind is not None and (name in served or not is_part):
            yield name, value, kind


def _is_defined_in(value: object, module: ModuleType) -> bool:
    return getattr(value, "__module__", None) == module.__name__


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
