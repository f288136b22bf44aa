"""Every rotary function of the installed transformers, found by reading it."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import transformers.models

from kernels_ext_npu.matching import find_function_reference, original_function

COUNTED = "5.22.2"  # the release of transformers whose functions tests/data/rotary.toml and the counts are about
HELPERS = ("rotate_half", "rotate_every_two", "rotate_pairwise")


@cache
def rotary_functions() -> dict[str, object]:
    """module:name -> the function, or what `kernels` made of it."""
    return {f"{module}:{name}": function for module, name, function in _functions() if _is_rotary(name, function)}


def _functions() -> Iterator[tuple[str, str, object]]:
    for package in pkgutil.iter_modules(transformers.models.__path__):
        folder = Path(transformers.models.__path__[0]) / package.name
        for path in sorted(folder.glob("modeling_*.py")):
            full_name = f"transformers.models.{package.name}.{path.stem}"
            try:
                module = importlib.import_module(full_name)
            except ImportError:  # needs a package that is not installed
                continue
            for name, value in vars(module).items():
                original = original_function(value)
                if original is not None and original.__module__ == full_name:
                    yield path.stem.removeprefix("modeling_"), name, value


def _is_rotary(name: str, function: object) -> bool:
    """By its name, by what it was decorated for, or because it calls a helper that rotates."""
    if find_function_reference(function) is not None or "rotary" in getattr(type(function), "kernel_layer_name", ""):
        return True
    if name.startswith(HELPERS):  # they are part of what calls them
        return False
    if any(word in name for word in ("rotary", "rope", "rotate")):
        return True
    try:
        tree = ast.parse(inspect.getsource(original_function(function)).lstrip())
    except (OSError, SyntaxError):
        return False
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return any(callee.startswith("rotate") for callee in called)
