"""Which modeling files of transformers belong to which model types.

transformers has a folder for the model types of a family, and says itself which: qwen3_vl, qwen3_vl_text and
qwen3_vl_vision are in models/qwen3_vl. What is in the files of a folder belongs to all of its types. A model type whose
folder has no modeling file is in the folder of the class that the auto classes make for it: gpt-sw3 is in models/gpt2.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import transformers
import transformers.models
from transformers.models.auto import AutoConfig, modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES, model_type_to_module_name

from kernels_ext_npu.environment import RefusedError

UNNAMED = "what its config names"  # for parts that have no default


@dataclass(frozen=True)
class Folder:
    """A folder of transformers with its model types.

    Attributes:
        name: the name of the folder, below models/.
        model_types: the model types as a config.json names them.
        files: its modeling files, as modules to import.
    """

    name: str
    model_types: tuple[str, ...]
    files: tuple[str, ...]


@cache
def folders() -> tuple[Folder, ...]:
    """Return all folders that have a model type, sorted by name."""
    named: dict[str, list[str]] = {}
    for model_type in CONFIG_MAPPING_NAMES:
        named.setdefault(model_type_to_module_name(model_type), []).append(model_type)
    found: dict[str, list[str]] = {}
    for name, types in named.items():
        found.setdefault(name if _files(name) else _made_in(types) or name, []).extend(types)
    return tuple(Folder(name, tuple(sorted(types)), _files(name)) for name, types in sorted(found.items()))


def find(model_types: Iterable[str]) -> list[Folder]:
    """Find the folders of these model types, in their order.

    Raises:
        RefusedError: one of them is none. It says which are called nearly so.
    """
    found: dict[Folder, None] = {}
    for model_type in model_types:
        folder = next((folder for folder in folders() if model_type in folder.model_types), None)
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
    found = dict.fromkeys(part for model_type in folder.model_types for part in _parts(model_type))
    return tuple(part for part in found if part not in folder.model_types)


def load(file: str) -> ModuleType | str:
    """Import a modeling file, and return it, or why it cannot be imported."""
    try:
        return importlib.import_module(file)
    except ModuleNotFoundError as error:
        return f"needs {error.name}, which is not installed"
    except Exception as error:  # whatever the packages that it needs come up with
        return f"cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _parts(model_type: str) -> Iterator[str]:
    config_class = CONFIG_MAPPING[model_type]
    names = [name for name, declared in config_class.sub_configs.items() if declared is AutoConfig]
    try:
        config = config_class() if names else None
    except Exception:  # there are configs that cannot be made without arguments
        yield UNNAMED
        return
    for name in names:
        part: str = getattr(getattr(config, name, None), "model_type", "")
        if part in CONFIG_MAPPING_NAMES:
            yield part


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
