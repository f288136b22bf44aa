"""Find the pattern of a class or a function, and say why an instance is not served."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

from torch import nn

from kernels_ext_npu.matching.fingerprint import class_methods, compared_methods
from kernels_ext_npu.matching.known_forwards import known_name
from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.transformers_internals import original_function, package_function

# by class, its forward and its methods, since libraries replace these; or by function
_found: dict[object, Pattern | None] = {}


def find_pattern(what: object) -> Pattern | None:
    """Find the pattern that computes what a class computes, or a function, or the module that `kernels` made of one.

    It is None if no pattern matches.
    """
    key: Any = (what, getattr(what, "forward", None)) if isinstance(what, type) else original_function(what)
    if isinstance(what, type) and key[1] is not None and (methods := compared_methods(what, key[1])):
        key = *key, class_methods(what, methods)
    if key is None:
        return None
    if key not in _found:
        name = known_name(what)
        fitting = _patterns().get(name, ()) if name is not None else ()
        _found[key] = next((pattern for pattern in fitting if _has_siblings(key, pattern)), None)
    return _found[key]


def why_not_served(module: nn.Module, pattern: Pattern) -> str | None:
    """Return why no layer serves an instance of what a pattern computes; None if one does."""
    for part in pattern.parts:
        member = getattr(module, part.name)
        for cls in {type(each): None for each in (member if isinstance(member, nn.ModuleList) else [member])}:
            if known_name(cls) not in part.classes:
                return part.reason.format(cls.__name__)
        if not part.is_called and has_hooks(member):
            return f"hooks watch its {part.name}, which the kernel does not call"
    module_class: Any = type(module)
    methods = compared_methods(module_class, module_class.forward)
    if methods and (given := methods & vars(module).keys()):
        return f"it was given a {min(given)} of its own"
    if pattern.guard is not None and not pattern.guard.holds(module):
        return pattern.guard.reason.format(module)
    return pattern.limits(module)


def _has_siblings(function: FunctionType, pattern: Pattern) -> bool:
    """Tell whether the file of a function has one of the siblings that a pattern asks for, as transformers' own."""
    siblings = [function.__globals__[name] for name in pattern.sibling_functions if name in function.__globals__]
    return not pattern.sibling_functions or any(package_function(sibling) is None for sibling in siblings)


@cache
def _patterns() -> dict[str, list[Pattern]]:
    """Return the patterns by their names."""
    from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS, PATTERNS  # register() need not wait for them

    found: dict[str, list[Pattern]] = {}
    for pattern in (*PATTERNS, *FUNCTION_PATTERNS):
        found.setdefault(pattern.name, []).append(pattern)
    return found
