"""Find the functions that the methods of a class call and that kernels may serve."""

from __future__ import annotations

import dis
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import FunctionType
from typing import Any, NamedTuple

from kernels_ext_npu.catalogue import Kind
from kernels_ext_npu.matching.classification import classify_function, referenced_names
from kernels_ext_npu.transformers_internals import cells, original_function

_NOT_MODELS = re.compile(r"(torch|torch_npu|kernels|transformers(?!\.models))(\.|$)")


class CalledFunction(NamedTuple):
    """A function that a modeling file calls: the file, the name there, and the kind."""

    file: str
    name: str
    kind: Kind

    @property
    def function(self) -> Any:
        """The function, or the module that `kernels` made of it; None if a class has the name by now."""
        found = vars(sys.modules[self.file]).get(self.name)
        return None if isinstance(found, type) else found


def _find_called_functions(cls: type) -> tuple[CalledFunction, ...]:
    """Return the functions that a class calls, itself or by functions of its file, and that may be served."""
    found: dict[CalledFunction, None] = {}
    waiting = _functions(cls)
    for function in waiting:  # grows while it runs
        module = sys.modules.get(function.__module__)
        if _NOT_MODELS.match(function.__module__) or vars(module or object) is not function.__globals__:
            continue
        names = sorted(referenced_names(function) & function.__globals__.keys())
        imported = () if function.__module__.startswith("transformers.") else _imported_when_called(function)
        for file, name in (*((function.__module__, name) for name in names), *imported):
            value = vars(sys.modules[file])[name]
            original = original_function(value)
            if original is None:
                continue
            if (kind := classify_function(name, value)) is not None:
                found[CalledFunction(file, name, kind)] = None
            elif original.__module__ == function.__module__ and original not in waiting:
                waiting.append(original)
    return tuple(found)


called_functions: Callable[[type], tuple[CalledFunction, ...]] = cache(_find_called_functions)


def _imported_when_called(function: FunctionType) -> Iterator[tuple[str, str]]:
    """Yield what a function imports by itself from files that are loaded: the file, and the name there."""
    steps = list(dis.get_instructions(function))
    for place, step in enumerate(steps):
        if step.opname == "IMPORT_NAME" and (names := steps[place - 1].argval):
            package = function.__globals__.get("__package__") or ""
            try:
                file = importlib.util.resolve_name("." * steps[place - 2].argval + step.argval, package)
            except ImportError:  # as the function itself would raise, whose file is in no package
                continue
            if file in sys.modules and not _NOT_MODELS.match(file):
                yield from ((file, name) for name in names if name in vars(sys.modules[file]))


def _functions(cls: type) -> list[FunctionType]:
    """Return the functions of a class and of its bases in files of models, also below decorators."""
    found: dict[FunctionType, None] = {}
    for value in [v for base in cls.__mro__ if not _NOT_MODELS.match(base.__module__) for v in vars(base).values()]:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        while isinstance(value, FunctionType):
            found[value] = None
            if value.__closure__:
                found.update({inner: None for inner in cells(value).values() if isinstance(inner, FunctionType)})
            value = getattr(value, "__wrapped__", None)
    return list(found)
