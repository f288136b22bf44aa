"""Lists classes and rotary functions of all modeling files of transformers whose requirements are installed."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from functools import cache
from types import ModuleType

from torch import nn

from kernels_ext_npu.catalogue import ROTARY, Kind
from kernels_ext_npu.coverage import survey
from kernels_ext_npu.coverage.survey import SHARED, classes_of, functions_of
from kernels_ext_npu.matching import classification


@cache
def classes(kind: Kind) -> tuple[type[nn.Module], ...]:
    """Return the classes of transformers that are counted among a kind."""
    return tuple(cls for cls in module_classes() if classification.of_class(cls) is kind)


@cache
def rotary_functions() -> dict[str, object]:
    """Return the rotary functions of transformers, or what `kernels` made of them, by ``file:name``."""
    found = ((module, *function) for module in modeling_files() for function in functions_of(module))
    files = ((module.__name__.rpartition("modeling_")[2], *function) for module, *function in found)
    return {f"{file}:{name}": function for file, name, function, kind in files if kind is ROTARY}


def module_classes() -> Iterator[type[nn.Module]]:
    """Find the classes of modules of every architecture that can be imported, and of what they share."""
    for module in (*modeling_files(), *map(importlib.import_module, SHARED.files)):
        yield from classes_of(module)


@cache
def modeling_files() -> tuple[ModuleType, ...]:
    """Import the modeling files of transformers whose requirements are installed, without what packages complain of."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loaded = [survey.load(file) for folder in survey.all_folders() for file in folder.files]
    finally:
        logging.disable(before)
    return tuple(module for module in loaded if isinstance(module, ModuleType))
