"""Forwards that are written anew: a syntax tree that was changed becomes a function in the place of the old one."""

from __future__ import annotations
import __future__

import ast
import inspect
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any

_MAKE = "_kernels_make"


def maker(tree: ast.FunctionDef, forward: FunctionType, names: Sequence[str]) -> Callable[..., FunctionType]:
    """Compile a forward that was changed, over the globals of the old one, and with its defaults.

    Args:
        tree: the new one, which is changed further.
        forward: the old one.
        names: those that the new one reads beside its own and the globals.

    Returns:
        What gives the new one for values of the names, in their order.
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
        new.__defaults__, new.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
        return new

    return make
