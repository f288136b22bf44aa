"""Lists classes and rotary functions of all modeling files of transformers whose requirements are installed."""

import ast
import gc
import importlib
import inspect
import logging
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any
from unittest import mock

import transformers.utils
from torch import nn

from kernels_ext_npu.catalogue import ROTARY, Kind
from kernels_ext_npu.coverage import survey
from kernels_ext_npu.coverage.survey import SHARED, classes_in, functions_in
from kernels_ext_npu.matching import classification


@cache
def classes(kind: Kind) -> tuple[type[nn.Module], ...]:
    """Return the classes of transformers that are counted among a kind."""
    return tuple(cls for cls in module_classes() if classification.classify_class(cls) is kind)


@cache
def rotary_functions() -> dict[str, object]:
    """Return the rotary functions of transformers, or what `kernels` made of them, by ``file:name``."""
    found = ((module, *function) for module in modeling_files() for function in functions_in(module))
    files = ((module.__name__.rpartition("modeling_")[2], *function) for module, *function in found)
    return {f"{file}:{name}": function for file, name, function, kind in files if kind is ROTARY}


def differing(classes: Iterable[type[nn.Module]]) -> list[type[nn.Module]]:
    """Return one of all classes that are written alike but for their names and annotations: all compute the same."""
    return list({code(cls): cls for cls in classes}.values())


def code(of: type | Callable) -> str:
    """Return the code of a function, or of all methods of a class, with that of the functions that it calls by name."""
    bases = [base for base in getattr(of, "__mro__", ()) if not base.__module__.startswith(("torch", "builtins"))]
    members = [item for base in bases for item in vars(base).items() if item[0] not in ("__doc__", "__module__")]
    functions = [value for _, value in members or [("", of)] if isinstance(value, FunctionType)]
    values = [repr(item) for item in members if isinstance(item[1], bool | int | float | str | None)]
    called = {name: f.__globals__.get(name) for f in functions for name in f.__code__.co_names}
    helpers = [f for _, f in sorted(called.items()) if isinstance(f, FunctionType)]
    return "\n".join([*values, *map(_plain, [*functions, *helpers])])


@cache
def _plain(function: FunctionType) -> str:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    tree.body[0].name = ""
    for node in ast.walk(tree):
        for field in {"annotation", "returns"} & set(node._fields):
            setattr(node, field, None)
        if isinstance(node, ast.FunctionDef):  # without docstrings
            node.body = [n for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
    return ast.dump(tree)


def module_classes() -> Iterator[type[nn.Module]]:
    """Find the classes of modules of every architecture that can be imported, and of what they share."""
    for module in (*modeling_files(), *map(importlib.import_module, SHARED.files)):
        yield from classes_in(module)


@cache
def modeling_files() -> tuple[ModuleType, ...]:
    """Import the modeling files of transformers whose requirements are installed, without what packages complain of.

    And without docstrings that transformers would write while they are imported, a third of the time, and without
    looking for garbage, then or later, in what they define.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(), mock.patch.object(transformers.utils, "auto_docstring", _undocumented):
            warnings.simplefilter("ignore")
            loaded = [survey.load(file) for folder in survey.all_folders() for file in folder.files]
    finally:
        logging.disable(before)
        gc.freeze()
        gc.enable()
    return tuple(module for module in loaded if isinstance(module, ModuleType))


def _undocumented(documented: Any = None, **options: Any) -> Any:
    """Decorate as transformers' ``auto_docstring`` does, with or without arguments, and change nothing."""
    return _undocumented if documented is None else documented
