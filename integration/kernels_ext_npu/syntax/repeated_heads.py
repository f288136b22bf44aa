"""Forwards that repeat the heads of queries and keys for functions that share heads themselves, by the syntax tree.

Layers with a gated delta rule write, up to transformers 5.22,

    if self.num_v_heads // self.num_k_heads > 1:
        query = query.repeat_interleave(self.num_v_heads // self.num_k_heads, dim=2)
        key = key.repeat_interleave(self.num_v_heads // self.num_k_heads, dim=2)

and hand both to the rule, as its first two arguments, and to nothing else. Such a forward is written anew without these
lines; all others stay as they are.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from types import FunctionType

from kernels_ext_npu.syntax.source_tree import compile_forward, function_tree

_NAME = r"[^\W\d]\w*"
_RATIO = rf"{_NAME}(?:\.{_NAME})?(?: // {_NAME}\.{_NAME})?"
_REPEATS = re.compile(
    rf"if {_RATIO} > (?:1|{_NAME}\.{_NAME}):\n"
    rf"(?:    (?P<ratio>{_NAME}) = {_RATIO}\n)?"
    rf"    (?P<query>{_NAME}) = (?P=query)\.repeat_interleave\((?P<times>{_RATIO}), dim=2\)\n"
    rf"    (?P<key>{_NAME}) = (?P=key)\.repeat_interleave\((?P=times), dim=2\)"
)


@cache
def without_repeats(forward: object, rules: frozenset[str]) -> FunctionType | None:
    """Return a forward that hands queries and keys on as they are; None where it repeats none, or uses them otherwise.

    Args:
        forward: of a class, with one decorator of transformers at most, which stays.
        rules: the names of the functions that share heads.
    """
    written = getattr(forward, "__wrapped__", forward)
    if not isinstance(forward, FunctionType) or not isinstance(written, FunctionType) or written.__code__.co_freevars:
        return None
    tree = function_tree(written)
    if tree is None or len(tree.decorator_list) != (forward is not written):
        return None
    for place, statement in enumerate(tree.body):
        found = _REPEATS.fullmatch(ast.unparse(statement))
        if found is not None and _are_handed_on(tree.body[place + 1 :], found, rules):
            tree.body[place] = ast.copy_location(ast.Pass(), statement)
            return compile_forward(tree, written, ())()
    return None


def _are_handed_on(body: list[ast.stmt], found: re.Match[str], rules: frozenset[str]) -> bool:
    """Tell whether what was repeated is handed to rules alone."""
    nodes = [node for statement in body for node in ast.walk(statement)]
    named = [node for node in nodes if isinstance(node, ast.Name) and node.id in found.group("query", "key", "ratio")]
    given = [
        argument
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in rules
        for argument, name in zip(node.args, found.group("query", "key"))
        if isinstance(argument, ast.Name) and argument.id == name
    ]
    return bool(given) and len(named) == len(given)
