"""Patterns whose source is that of another one with a few words replaced."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from typing import Any


def reworded(name: str, base: Any, changes: dict[str, str], method: str = "forward") -> Any:
    """Return a copy of a function, or a subclass with a copy of a method, whose source has some words replaced.

    It belongs to the module of the original. inspect, tracebacks and torch.compile find its source.

    Example:
        >>> blt = variant("blt", llama, {"rotate_half": "rotate_neighbours"})

    Args:
        name: the name of the result, which has to be new in the file.
        base: the function or class that is copied.
        changes: old words -> new words, replaced wherever they stand.
        method: the method of a class that is copied.

    Raises:
        ValueError: the words are not in the source, or the name is taken.
    """
    original = getattr(base, method) if isinstance(base, type) else base
    source = textwrap.dedent(inspect.getsource(original))
    for old, new in changes.items():
        if old not in source:
            raise ValueError(f"{original.__qualname__} has no {old!r}")
        source = source.replace(old, new)
    if original is base:
        source = source.replace(f"def {base.__name__}(", f"def {name}(")
    file = f"<{original.__module__}.{name}>"
    if file in linecache.cache:
        raise ValueError(f"there is a {file} already, whose source would be read in place of this one")
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), vars(sys.modules[base.__module__]), made)
    (written,) = made.values()
    return written if original is base else type(name, (base,), {method: written, "__module__": base.__module__})
