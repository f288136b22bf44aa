"""Which layers of a module are called with one input: queries, keys and values of an attention, gate and up of an MLP.

Read from the syntax tree of its forward. Of

    query_states = self.q_proj(hidden_states).view(hidden_shape)
    key_states = self.k_proj(hidden_states).view(hidden_shape)

the two are siblings: each is called once, on every way through the forward, with a variable that nothing is assigned to
in between. What the tree does not show, such as a change of what the variable holds, is looked at in every call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from types import FunctionType
from typing import NamedTuple

from torch import nn

_LOOKS = ("device", "dtype", "shape")


class Siblings(NamedTuple):
    """Layers that a module calls with one input.

    Attributes:
        names: of the module's members, in the order of the calls.
        caller: the forward that calls them.
    """

    names: tuple[str, ...]
    caller: FunctionType


def siblings_in(module: nn.Module) -> tuple[Siblings, ...]:
    """Return the layers that the forward of a module's class calls with one input, two or more each."""
    forward = inspect.unwrap(type(module).forward)
    return _siblings_of(forward) if isinstance(forward, FunctionType) else ()


@functools.cache
def _siblings_of(forward: FunctionType) -> tuple[Siblings, ...]:
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return ()
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return ()
    me = tree.args.args[0].arg
    calls: dict[str, list[tuple[int, str]]] = {}  # variable -> which statement calls which member with it
    everything = [name for statement in tree.body for _, name in _calls(statement, me)]
    for place, statement in enumerate(tree.body):
        if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
            for variable, name in _calls(statement, me):
                if everything.count(name) == 1:
                    calls.setdefault(variable, []).append((place, name))
    return tuple(
        Siblings(tuple(name for _, name in called), forward)
        for variable, called in calls.items()
        if len(called) > 1 and _is_only_read(variable, tree.body[called[0][0] : called[-1][0] + 1], me)
    )


def _calls(statement: ast.stmt, me: str) -> list[tuple[str, str]]:
    """Return the variables with which a statement calls members of ``me``, each with the member, in their order."""
    found = [
        (node.lineno, node.col_offset, node.args[0].id, node.func.attr)
        for node in ast.walk(statement)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == me
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Name)
        and not node.keywords
    ]
    perhaps = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    if any(isinstance(node, perhaps) for node in ast.walk(statement)):
        return [(f"{variable} in {name}, perhaps", name) for _, _, variable, name in sorted(found)]
    return [(variable, name) for _, _, variable, name in sorted(found)]


def _is_only_read(variable: str, statements: list[ast.stmt], me: str) -> bool:
    """Tell whether statements do nothing with a variable but call members with it and look at its shape.

    The last of them may give the name to something else, once it has called.
    """
    nodes = [node for statement in statements for node in ast.walk(statement)]
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == variable]
    assigned = [node for node in ast.walk(statements[-1]) if node in uses and not isinstance(node.ctx, ast.Load)]  # type: ignore[attr-defined]
    looks = [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in _LOOKS]
    calls = [name for statement in statements for name, _ in _calls(statement, me) if name == variable]
    leaves = any(
        isinstance(node, (ast.Return, ast.Raise)) for statement in statements[:-1] for node in ast.walk(statement)
    )
    return not leaves and len(uses) == len(assigned) + len(calls) + sum(node in uses for node in looks)
