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
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType

from kernels_ext_npu.matching.source_tree import compile_forward, function_tree
from kernels_ext_npu.transformers_internals import are_seen_through, below_wrappers

_NORMED, _ADD_NORM, _ADDED = "_kernels_normed", "_kernels_add_norm", "_kernels_added"
_NAME = r"[^\W\d]\w*"
_SUM = re.compile(rf"(?P<x>{_NAME}) = (?:(?P<left>{_NAME}) \+ (?P=x)|(?P=x) \+ (?P<right>{_NAME}))")


@dataclass(frozen=True)
class Sums:
    """Holds the sums of a forward."""

    # returns the forward with other functions in their place: ``normed(layer, norm, x)``, ``add_norm(layer, norm, x,
    # residual)``, which returns the norm and the sum, and ``added(layer, x, residual)``
    make: Callable[..., FunctionType]
    first: str | None  # the attribute of the norm that it begins with; None if it does not
    norms: tuple[str, ...]  # the attributes of the norms of sums


@cache
def find_sums(forward: object) -> Sums | None:
    """Return the sums of a forward; None where it norms none, or its source cannot be read."""
    written = below_wrappers(forward)
    tree = None if written is None or written.__code__.co_freevars else function_tree(written)
    if written is None or tree is None or len(tree.args.args) < 2:
        return None
    if not are_seen_through(tree.decorator_list, written.__globals__):
        return None
    tree.body, first, norms = _rewritten(tree.body, tree.args.args[0].arg, tree.args.args[1].arg)
    return Sums(compile_forward(tree, written, (_NORMED, _ADD_NORM, _ADDED)), first, tuple(norms)) if norms else None


def _rewritten(body: list[ast.stmt], me: str, given: str) -> tuple[list[ast.stmt], str | None, list[str]]:
    """Return a body with calls in place of its sums, the norm that it begins with, and those of the sums."""
    texts = [ast.unparse(statement) for statement in body]
    begin = int(isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant))  # behind the docstring
    new, first, norms, place = [], None, [], 0
    while place < len(body):
        now, then, last = (*texts[place : place + 3], "", "")[:3]
        taken, call = 1, None
        if (summed := _SUM.fullmatch(now)) is not None:
            x, residual = summed["x"], summed["left"] or summed["right"]
            if x == residual:
                pass
            elif then == f"{residual} = {x}" and (norm := _norm(last, me, x)) is not None:
                taken, call = 3, f"{x}, {residual} = {_ADD_NORM}({me}, {me}.{norm}, {x}, {residual})"
                norms.append(norm)
            elif then == f"return {x}" and place + 2 == len(body):
                call = f"{x} = {_ADDED}({me}, {x}, {residual})"
        elif place == begin + 1 and re.fullmatch(f"{_NAME} = {given}", texts[begin]):
            first = _norm(now, me, given)
            call = first and f"{given} = {_NORMED}({me}, {me}.{first}, {given})"
        new.append(ast.copy_location(ast.parse(call).body[0], body[place]) if call else body[place])
        place += taken
    return new, first, norms


def _norm(text: str, me: str, x: str) -> str | None:
    """Return the attribute of ``x = me.attribute(x)``."""
    found = re.fullmatch(rf"{x} = {me}\.({_NAME})\({x}\)", text)
    return found and found[1]
