"""The syntax trees of functions."""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import CodeType, FunctionType

_sources: dict[tuple[CodeType, str], str | None] = {}  # by file too: equal lines of two files are equal code


def function_tree(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of a function with its decorators; None if it wraps another, or its source cannot be read.

    Only the source is cached: the caller may change the tree.
    """
    if hasattr(function, "__wrapped__"):  # whose source inspect would read
        return None
    key = function.__code__, function.__code__.co_filename
    if key not in _sources:
        _sources[key] = _source(function)
    tree = ast.parse(_sources[key] or "pass").body[0]
    return tree if isinstance(tree, ast.FunctionDef) else None


def _source(function: FunctionType) -> str | None:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        (_,) = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):  # no source file, or not one statement
        return None
    return source
