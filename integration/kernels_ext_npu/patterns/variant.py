"""Patterns that differ from another one in a few words."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable
from typing import Any


def variant(changes: dict[str, str], of: Callable | None = None, method: str = "forward") -> Callable[[Any], Any]:
    """Return a decorator that writes a function, or the method that a class inherits, in other words.

    Its source is found where inspect, tracebacks and torch.compile look for one.

    Example:
        >>> @variant({"rotate_half": "rotate_neighbours"}, of=llama)
        ... def blt():
        ...     "Rotate neighbours against each other."

    Args:
        changes: what takes the place of which words, wherever they stand.
        of: the function that is changed; none for a class.
        method: the method of a class that is changed.

    Raises:
        ValueError: the words are not in the source.
    """

    def decorate(target: Any) -> Any:
        if of is None:
            setattr(target, method, _written(getattr(target, method), changes, target))
            return target
        function = _written(of, {f"def {of.__name__}(": f"def {target.__name__}("} | changes, target)
        function.__doc__ = target.__doc__
        return function

    return decorate


def _written(original: Callable, changes: dict[str, str], owner: Any) -> Callable:
    source = textwrap.dedent(inspect.getsource(original))
    for old, new in changes.items():
        if old not in source:
            raise ValueError(f"{original.__qualname__} has no {old!r}")
        source = source.replace(old, new)
    file = f"<{original.__name__} of {owner.__module__}.{owner.__qualname__}>"
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    made: dict[str, Callable] = {}
    exec(compile(source, file, "exec"), vars(sys.modules[owner.__module__]), made)
    return next(iter(made.values()))
