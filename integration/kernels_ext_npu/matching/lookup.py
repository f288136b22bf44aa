"""Which classes and functions compute what: their fingerprints against those of the references."""

from __future__ import annotations

from functools import cache
from types import FunctionType

from kernels_ext_npu.references import FUNCTION_REFERENCES, REFERENCES, FunctionReference, Reference
from kernels_ext_npu.references.fingerprints import (
    fingerprint,
    function_fingerprint,
    function_words,
    original_function,
    words,
)

_found: dict[tuple[type, object], Reference | None] = {}  # by class and forward: other libraries replace forwards
_found_functions: dict[FunctionType, FunctionReference | None] = {}


def find_reference(cls: type) -> Reference | None:
    """Find the reference that computes what ``cls`` computes; None if there is none."""
    key = cls, getattr(cls, "forward", None)
    if key not in _found:
        _found[key] = _patterns().get(fingerprint(cls)) if words(cls) in _words_of_references() else None
    return _found[key]


def find_function_reference(function: object) -> FunctionReference | None:
    """Find the reference that computes what a function computes; None if there is none.

    Args:
        function: a function, or the module that `kernels` made of one. Anything else matches nothing.
    """
    original = original_function(function)
    if original is None:
        return None
    if original not in _found_functions:
        known = function_words(original) in _words_of_function_references()
        found = _function_patterns().get(function_fingerprint(function), ()) if known else ()
        _found_functions[original] = next((reference for reference in found if reference.fits(original)), None)
    return _found_functions[original]


@cache
def _words_of_references() -> frozenset[tuple[str, ...]]:
    return frozenset(words(reference.module) for reference in REFERENCES)


@cache
def _words_of_function_references() -> frozenset[tuple[str, ...]]:
    originals = (original_function(reference.function) for reference in FUNCTION_REFERENCES)
    return frozenset(function_words(original) for original in originals if original is not None)


@cache
def _patterns() -> dict[str | None, Reference]:
    return {fingerprint(reference.module): reference for reference in REFERENCES}


@cache
def _function_patterns() -> dict[str | None, list[FunctionReference]]:
    found: dict[str | None, list[FunctionReference]] = {}
    for reference in FUNCTION_REFERENCES:
        found.setdefault(function_fingerprint(reference.function), []).append(reference)
    return found
