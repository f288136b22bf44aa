"""Which classes and functions compute what: their fingerprints against those of the patterns."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from kernels_ext_npu.matching.decorated import original_function, package_function
from kernels_ext_npu.matching.fingerprint import compared_methods, computes_as, words
from kernels_ext_npu.patterns.hooks import has_hooks
from kernels_ext_npu.patterns.pattern import Pattern

_found: dict[object, Pattern | None] = {}  # by class and forward, since other libraries replace these; by function


def find_pattern(what: object) -> Pattern | None:
    """Find the pattern that computes what a class computes, or a function, or the module that `kernels` made of one.

    It is None if there is none, and for anything else.
    """
    key: Any = (what, getattr(what, "forward", None)) if isinstance(what, type) else original_function(what)
    if key is None:
        return None
    if key not in _found:
        alike = _by_words().get((isinstance(what, type), words(what)), ())
        found = (
            p for p in alike if _is_beside(key, p) and computes_as(what, p.original, with_gradients=p.has_gradients)
        )
        _found[key] = next(found, None)
    return _found[key]


def why_not_served(module: nn.Module, pattern: Pattern) -> str | None:
    """Return why no layer serves an instance of what a pattern computes; None if one does."""
    for part in pattern.parts:
        member = getattr(module, part.name)
        for cls in {type(each): None for each in (member if isinstance(member, nn.ModuleList) else [member])}:
            if not computes_as(cls, *part.classes):
                return part.reason.format(cls.__name__)
        if not part.is_called and has_hooks(member):
            return f"hooks watch its {part.name}, which the kernel does not call"
    of_class: Any = type(module)
    methods = compared_methods(of_class, of_class.forward)
    if methods and (given := methods & vars(module).keys()):
        return f"it was given a {min(given)} of its own"
    return pattern.limits(module)


def _computes(what: object, pattern: Pattern) -> bool:
    return computes_as(what, pattern.original, with_gradients=pattern.has_gradients)


def _is_beside(function: FunctionType, pattern: Pattern) -> bool:
    """Tell whether what a pattern asks for is in the file of a function."""
    beside = [function.__globals__[name] for name in pattern.beside if name in function.__globals__]
    return not pattern.beside or any(package_function(neighbour) is None for neighbour in beside)


@cache
def _by_words() -> dict[tuple[bool, tuple[str, ...]], list[Pattern]]:
    """Return the patterns by whether they are of a class, and the words that they are in."""
    from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS, PATTERNS  # register() need not wait for them

    found: dict[tuple[bool, tuple[str, ...]], list[Pattern]] = {}
    for pattern in (*PATTERNS, *FUNCTION_PATTERNS):
        original = pattern.original
        found.setdefault((isinstance(original, type), words(original)), []).append(pattern)
    return found
