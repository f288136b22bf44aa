"""Snapshots of libraries: every global of their modules, every attribute of their classes, every entry of mappings."""

import inspect
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from torch import nn

LIBRARIES = ("transformers", "kernels", "torch", "accelerate", "peft", "huggingface_hub")
_MADE_BY_PYTHON = ("__annotations__", "__dict__")  # made when they are first asked for
_DEPTH = 4  # of mappings and lists in each other

# path -> object, held so that no other object can take its place in memory
Snapshot = dict[str, Any]


def snapshot(*models: nn.Module) -> Snapshot:
    """Return what stands where in all modules of the libraries that are imported, and in some models."""
    found: Snapshot = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                found.update(_inside(f"{name}.{key}", value, module.__name__, _DEPTH))
    for number, model in enumerate(models):
        for path, module in model.named_modules():
            found |= {f"model {number}.{path}.{key}": value for key, value in _members(module)}
    return found


def differences(before: Snapshot, after: Snapshot) -> list[str]:
    """Name every place that holds something else, or nothing, or something that was not there.

    What lies in a module that was not imported before is no difference.
    """
    modules = {".".join(path.split(".")[:-1]) for path in before}
    changed = [path for path, value in before.items() if path not in after or not _same(after[path], value)]
    new = [path for path in after.keys() - before.keys() if any(part in modules for part in _parents(path))]
    return sorted(changed) + sorted(f"new: {path}" for path in new)


def _inside(path: str, value: Any, module: str, depth: int) -> Iterator[tuple[str, Any]]:
    if inspect.isclass(value) and value.__module__ == module:
        for name, attribute in vars(value).items():
            if name not in _MADE_BY_PYTHON:
                yield f"{path}.{name}", attribute
            if isinstance(attribute, (dict, list, set)):
                yield from _inside(f"{path}.{name}", attribute, module, depth - 1)
    elif isinstance(value, nn.Module):  # `kernels` makes one of a function
        yield from ((f"{path}.{name}", member) for name, member in _members(value))
        yield from ((f"{path}(type).{name}", member) for name, member in vars(type(value)).items())
    elif hasattr(type(value), "get") and type(value).__name__ == "ContextVar":
        yield from _inside(f"{path}()", value.get({}), module, depth)
    elif isinstance(value, (dict, list)) and depth and path.rpartition(".")[2] != "__builtins__":
        entries = dict.items(value) if isinstance(value, dict) else enumerate(list.copy(value))  # lazy ones load
        for key, entry in list(entries):
            yield f"{path}[{key!r}]", entry
            yield from _inside(f"{path}[{key!r}]", entry, module, depth - 1)


def _members(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a module holds beside its parameters; of what is a dictionary, its keys."""
    for name, value in vars(module).items():
        yield name, sorted(map(str, value)) if isinstance(value, dict) else value


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (str, int, float, list, tuple, bool, type(None))) and a == b)


def _parents(path: str) -> Iterator[str]:
    parts = path.split(".")
    return (".".join(parts[:end]) for end in range(1, len(parts)))
