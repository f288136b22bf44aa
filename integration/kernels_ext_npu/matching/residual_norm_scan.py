"""Layers whose forward adds what a part of it gives to a residual, and norms the sum: found by the syntax tree.

Most decoder layers write

    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)             # begins with a norm
    ...
    hidden_states = residual + hidden_states                        # a sum, and the norm of it
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    ...
    hidden_states = residual + hidden_states                        # ends with a sum
    return hidden_states

Such a forward is written anew, with a call in place of each of the three; all other lines stay as they are. One that
scales what it adds, or norms before it adds, has no such lines.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType

from kernels_ext_npu.matching.source_tree import function_tree, maker

_NORMED, _ADD_NORM, _ADDED = "_kernels_normed", "_kernels_add_norm", "_kernels_added"


@dataclass(frozen=True)
class Sums:
    """Holds the sums of a forward.

    Attributes:
        make: returns the forward with other functions in their place: ``normed(norm, x)``, ``add_norm(layer, norm, x,
            residual)``, which returns the norm and the sum, and ``added(layer, x, residual)``.
        first: the attribute of the norm that it begins with; None if it does not.
        norms: the attributes of the norms of sums.
    """

    make: Callable[..., FunctionType]
    first: str | None
    norms: tuple[str, ...]


_found: dict[FunctionType, Sums | None] = {}


def sums_of(forward: object) -> Sums | None:
    """Return the sums of a forward; None where it norms none, or its source cannot be read."""
    if not isinstance(forward, FunctionType):
        return None
    if forward not in _found:
        _found[forward] = _look(forward)
    return _found[forward]


def _look(forward: FunctionType) -> Sums | None:
    if hasattr(forward, "__wrapped__") or forward.__code__.co_freevars:
        return None
    tree = function_tree(forward)
    if tree is None or tree.decorator_list or len(tree.args.args) < 2:
        return None
    rewriting = _Rewriting(tree.args.args[0].arg, tree.args.args[1].arg)
    tree.body = rewriting.body(tree.body)
    if not rewriting.norms:
        return None
    return Sums(maker(tree, forward, (_NORMED, _ADD_NORM, _ADDED)), rewriting.first, tuple(rewriting.norms))


class _Rewriting:
    """The body of a forward, statement by statement."""

    def __init__(self, receiver: str, given: str) -> None:
        self._receiver, self._given = receiver, given
        self.first: str | None = None
        self.norms: list[str] = []

    def body(self, old: list[ast.stmt]) -> list[ast.stmt]:
        """Return it with calls in place of the sums."""
        new: list[ast.stmt] = []
        while old:
            taken, statements = self._next(old, not new or all(_is_docstring(statement) for statement in new))
            new += [ast.copy_location(statement, old[0]) for statement in statements]
            old = old[taken:]
        return new

    def _next(self, old: list[ast.stmt], is_first: bool) -> tuple[int, list[ast.stmt]]:
        kept = _copied(old[0])
        if is_first and kept and kept[1] == self._given and len(old) > 1:
            norm = self._norm(old[1], self._given)
            if norm:
                self.first = norm
                return 2, [old[0], *_lines(f"{kept[1]} = {_NORMED}({self._receiver}.{norm}, {kept[1]})")]
        summed = _summed(old[0])
        if summed is None:
            return 1, [old[0]]
        x, residual = summed
        if len(old) > 2 and _copied(old[1]) == (residual, x) and (norm := self._norm(old[2], x)):
            self.norms.append(norm)
            call = f"{_ADD_NORM}({self._receiver}, {self._receiver}.{norm}, {x}, {residual})"
            return 3, _lines(f"{x}, {residual} = {call}")
        last = old[1] if len(old) == 2 else None
        if isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and last.value.id == x:
            return 2, [*_lines(f"{x} = {_ADDED}({self._receiver}, {x}, {residual})"), last]
        return 1, [old[0]]

    def _norm(self, statement: ast.stmt, x: str) -> str | None:
        """Return the attribute of ``x = self.attribute(x)``."""
        text = ast.unparse(statement)
        start, end = f"{x} = {self._receiver}.", f"({x})"
        name = text[len(start) : -len(end)]
        return name if text == f"{start}{name}{end}" and name.isidentifier() else None


def _copied(statement: ast.stmt) -> tuple[str, str] | None:
    """Return the names of ``a = b``."""
    match statement:
        case ast.Assign([ast.Name(new)], ast.Name(old)):
            return new, old
    return None


def _summed(statement: ast.stmt) -> tuple[str, str] | None:
    """Return the names x and residual of ``x = residual + x``, in either order."""
    match statement:
        case ast.Assign([ast.Name(x)], ast.BinOp(ast.Name(left), ast.Add(), ast.Name(right))):
            others = {left, right} - {x}
            return (x, others.pop()) if x in (left, right) and others else None
    return None


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _lines(source: str) -> list[ast.stmt]:
    return ast.parse(source).body
