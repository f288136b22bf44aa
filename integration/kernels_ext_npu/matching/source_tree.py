"""The syntax trees of functions."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import CodeType, FunctionType


def function_tree(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of a function with its decorators; None where its source cannot be read.

    It is that of the function itself, whatever it wraps, and the caller may change it: only the source is cached.
    """
    source = _source(function.__code__, function.__code__.co_filename)
    if source is None:
        return None
    tree = ast.parse(source).body[0]
    return tree if isinstance(tree, ast.FunctionDef) else None


@functools.cache
def _source(code: CodeType, file: str) -> str | None:  # equal lines of two files are equal code
    try:
        source = textwrap.dedent(inspect.getsource(code))
        (_,) = ast.parse(source).body
    except (OSError, SyntaxError, ValueError):  # no source file, or not one statement
        return None
    return source
