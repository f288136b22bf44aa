"""The syntax trees of functions: read from their source, and made into functions again where they were changed.

The names in their code, and what it does, are known without reading the source.
"""

from __future__ import annotations
import __future__

import ast
import dis
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

_MAKE = "_kernels_make"
_sources: dict[tuple[CodeType, str], str | None] = {}  # by file too: equal lines of two files are equal code


def function_tree(function: object) -> ast.FunctionDef | None:
    """Return the syntax tree of a function with its decorators; None where `function_source` has none.

    Only the source is cached: the caller may change the tree.
    """
    tree = ast.parse(function_source(function) or "pass").body[0]
    return tree if isinstance(tree, ast.FunctionDef) else None


def function_source(function: object) -> str | None:
    """Return the source of a function; None if it wraps another, or its source cannot be read or is no statement."""
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):  # whose source inspect would read
        return None
    key = function.__code__, function.__code__.co_filename
    if key not in _sources:
        try:
            source = textwrap.dedent(inspect.getsource(function))
            (_,) = ast.parse(source).body
            _sources[key] = source
        except (OSError, SyntaxError, ValueError):  # no source file, or not one statement
            _sources[key] = None
    return _sources[key]


def compile_forward(tree: ast.FunctionDef, forward: FunctionType, names: Sequence[str]) -> Callable[..., FunctionType]:
    """Compile a forward that was changed, over the globals of the old one, with its defaults and below its decorators.

    What is returned gives it for values of the names that it reads beside its own and the globals, in their order.
    """
    tree.name = "forward"
    tree.args.defaults, tree.args.kw_defaults = [], [None] * len(tree.args.kwonlyargs)
    made: Any = ast.parse(f"def {_MAKE}({', '.join(names)}):\n    return None").body[0]
    made.body = [tree, ast.Return(ast.Name("forward", ast.Load()))]
    module = ast.fix_missing_locations(ast.Module([made], []))
    ast.increment_lineno(module, forward.__code__.co_firstlineno - 1)
    flags = __future__.annotations.compiler_flag
    code = compile(module, inspect.getsourcefile(forward) or "<forward>", "exec", flags, dont_inherit=True)
    function = FunctionType(next(c for c in code.co_consts if isinstance(c, CodeType)), forward.__globals__)

    def make(*values: Any) -> FunctionType:
        new = function(*values)
        written = inspect.unwrap(new)
        written.__defaults__, written.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__  # type: ignore
        return new

    return make


@cache
def code_names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in the code of a function, and of the functions in it."""
    return frozenset().union(*map(attrgetter("co_names"), nested_codes(code)))


def instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions in the code of a function, and of the functions in it."""
    for each in nested_codes(code):
        yield from dis.get_instructions(each)


def nested_codes(code: CodeType) -> list[CodeType]:
    """Return the code of a function, and of the functions in it."""
    codes = [code]
    for each in codes:  # grows while it runs
        codes += [constant for constant in each.co_consts if isinstance(constant, CodeType)]
    return codes


def written_globals(code: CodeType) -> list[str]:
    """Return the globals that the code of a function writes or deletes."""
    return [step.argval for step in instructions(code) if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL")]
