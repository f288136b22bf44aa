"""Which classes and functions compute what: their fingerprints against those of the patterns."""

from __future__ import annotations

from functools import cache
from types import FunctionType

from torch import nn

from kernels_ext_npu.matching.decorated import original_function, package_function
from kernels_ext_npu.matching.fingerprint import computes_as, function_fingerprint, function_words, words
from kernels_ext_npu.patterns.hooks import has_hooks
from kernels_ext_npu.patterns.pattern import Pattern

_found: dict[tuple[type, object], Pattern | None] = {}  # by class and forward: other libraries replace forwards
_found_functions: dict[FunctionType, Pattern | None] = {}


def find_pattern(cls: type) -> Pattern | None:
    """Find the pattern that computes what ``cls`` computes; None if there is none."""
    key = cls, getattr(cls, "forward", None)
    if key not in _found:
        alike = _by_words(type).get(words(cls), ())
        _found[key] = next((pattern for pattern in alike if computes_as(cls, pattern.original)), None)
    return _found[key]


def find_function_pattern(function: object) -> Pattern | None:
    """Find the pattern of a function, or of the module that `kernels` made of one; None of anything else."""
    original = original_function(function)
    if original is None:
        return None
    if original not in _found_functions:
        alike = [p for p in _by_words(FunctionType).get(function_words(original), ()) if _is_beside(original, p)]
        own = function_fingerprint(function) if alike else None
        found = (pattern for pattern in alike if function_fingerprint(pattern.original) == own is not None)
        _found_functions[original] = next(found, None)
    return _found_functions[original]


def why_not_served(module: nn.Module, pattern: Pattern) -> str | None:
    """Return why no layer serves an instance of what a pattern computes; None if one does."""
    for part in pattern.parts:
        member = getattr(module, part.name)
        for cls in {type(each): None for each in (member if isinstance(member, nn.ModuleList) else [member])}:
            if not computes_as(cls, *part.classes):
                return part.reason.format(cls.__name__)
        if not part.is_called and has_hooks(member):
            return f"hooks watch its {part.name}, which the kernel does not call"
    return pattern.limits(module)


def _is_beside(function: FunctionType, pattern: Pattern) -> bool:
    """Tell whether what a pattern asks for is in the file of a function."""
    beside = [function.__globals__[name] for name in pattern.beside if name in function.__globals__]
    return not pattern.beside or any(package_function(neighbour) is None for neighbour in beside)


@cache
def _by_words(kind: type) -> dict[tuple[str, ...], list[Pattern]]:
    """Return the patterns of classes or of functions by the words that they are in."""
    from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS, PATTERNS  # register() need not wait for them

    found: dict[tuple[str, ...], list[Pattern]] = {}
    for pattern in PATTERNS if kind is type else FUNCTION_PATTERNS:
        found.setdefault((words if kind is type else function_words)(pattern.original), []).append(pattern)
    return found
