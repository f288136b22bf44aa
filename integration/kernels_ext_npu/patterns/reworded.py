"""Patterns that differ from another one in a few words."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from typing import Any


def reworded(name: str, base: Any, changes: dict[str, str], method: str = "forward") -> Any:
    """Return a function in other words, or a class that inherits all but a method, which is in other words.

    It belongs to the file of the other one. Its source is where inspect, tracebacks and torch.compile look for one.

    Example:
        >>> blt = variant("blt", llama, {"rotate_half": "rotate_neighbours"})

    Args:
        name: what it is called, as nothing else of the file.
        of: the function or class that is changed.
        changes: what takes the place of which words, wherever they stand.
        method: the method of a class that is changed.

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
