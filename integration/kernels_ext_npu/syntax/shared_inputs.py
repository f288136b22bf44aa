"""Find layers that a module calls with one input: q, k and v of attention, gate and up of an MLP.

Read from the syntax tree of its forward. Of

    query_states = self.q_proj(hidden_states).view(hidden_shape)
    key_states = self.k_proj(hidden_states).view(hidden_shape)

both are: each is called once, on every way through the forward, with a variable of which nothing but the shape is read
in between.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re

from torch import nn

from kernels_ext_npu.syntax.source_tree import function_tree

_PERHAPS = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def layers_of_one_input(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the names of layers that the forward of a module's class calls with one input, in their order."""
    return _groups_in(inspect.unwrap(type(module).forward))


@functools.cache
def _groups_in(forward: object) -> tuple[tuple[str, ...], ...]:
    tree = function_tree(forward)
    if tree is None or not tree.args.args:
        return ()
    me = tree.args.args[0].arg
    names = [name for statement in tree.body for _, name in _calls(statement, me)]
    calls: dict[str, list[tuple[int, str]]] = {}  # variable -> which statement calls which member with it
    for place, statement in enumerate(tree.body):
        is_always = isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return))
        if is_always and not any(isinstance(node, _PERHAPS) for node in ast.walk(statement)):
            for variable, name in _calls(statement, me):
                if names.count(name) == 1:
                    calls.setdefault(variable, []).append((place, name))
    return tuple(
        tuple(name for _, name in called)
        for variable, called in calls.items()
        if len(called) > 1 and _is_only_read(variable, tree.body[called[0][0] : called[-1][0] + 1], me)
    )


def _calls(statement: ast.stmt, me: str) -> list[tuple[str, str]]:
    """Return the variables with which a statement calls members of ``me``, each with the member, in their order."""
    calls = re.findall(rf"(?<![\w.]){me}\.(\w+)\(([^\W\d]\w*)\)", ast.unparse(statement))
    return [(variable, name) for name, variable in calls]


def _is_only_read(variable: str, statements: list[ast.stmt], me: str) -> bool:
    """Tell whether statements do nothing with a variable but call members with it and look at its shape.

    The last of them may give the name to something else, once it has called.
    """
    nodes = [node for statement in statements for node in ast.walk(statement)]
    if any(isinstance(node, (ast.Return, ast.Raise)) for statement in statements[:-1] for node in ast.walk(statement)):
        return False
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == variable]
    given = [node for node in ast.walk(statements[-1]) if node in uses and isinstance(node.ctx, ast.Store)]  # type: ignore[attr-defined]
    looks = [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "shape" and node.value in uses]
    calls = [x for statement in statements for x, _ in _calls(statement, me) if x == variable]
    return len(uses) == len(given) + len(calls) + len(looks)
