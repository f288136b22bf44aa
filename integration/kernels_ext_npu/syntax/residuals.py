"""Residual streams: sums that a layer norms, and models that pass them on from layer to layer, by the syntax tree.

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

Most models write

    for i, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
        hidden_states = layer(hidden_states, attention_mask=masks[self.config.layer_types[i]], **kwargs)

so that between two layers no line of theirs has the hidden state. Others of the loop's statements may not name it, but
for one under ``if given is not None``, where ``given`` is an argument of the forward: without that it does not run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType

from kernels_ext_npu.syntax.source_tree import compile_forward, function_tree
from kernels_ext_npu.transformers_internals import are_seen_through, below_wrappers

_NORMED, _ADD_NORM, _ADDED = "_kernels_normed", "_kernels_add_norm", "_kernels_added"
_NAME = r"[^\W\d]\w*"
_SUM = re.compile(rf"(?P<x>{_NAME}) = (?:(?P<left>{_NAME}) \+ (?P=x)|(?P=x) \+ (?P<right>{_NAME}))")
_SEEN_THROUGH = ("transformers", "torch")  # whose decorators call what they decorate, and nothing in its place


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


@dataclass(frozen=True)
class LayerLoop:
    """Describes the loop of a forward over its layers."""

    layers: str  # the attribute of the list
    parameters: tuple[str, ...]  # the parameters of the forward, without self
    absent: frozenset[str]  # those of them that are None where layer follows on layer

    def follows(self, args: tuple, kwargs: dict[str, object]) -> bool:
        """Tell whether layer follows on layer in a call with these arguments."""
        given = dict(zip(self.parameters, args)) | kwargs
        return all(given.get(name) is None for name in self.absent)


@cache
def layer_loop(forward: object) -> LayerLoop | None:
    """Return the loop over layers of a forward; None where it has none, or its source cannot be read."""
    tree = function_tree(_below_decorators(forward))
    if tree is None or not tree.args.args:
        return None
    module, *parameters = [argument.arg for argument in tree.args.args]
    nodes = list(ast.walk(tree))
    optional = {*parameters} - {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    held = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    read = [n.attr for n in held if n.value.id == module]  # type: ignore[attr-defined]
    for loop in [node for node in nodes if isinstance(node, ast.For)]:
        name = _iterated_list(loop.iter, module)
        if name is not None and read.count(name) == 1 and (absent := _absent(loop, optional)) is not None:
            return LayerLoop(name, tuple(parameters), frozenset(absent))
    return None


def _below_decorators(forward: object) -> FunctionType | None:
    """Return the forward as it is in its file; None where others than transformers or torch have put something over it.

    It may do what it likes in its place.
    """
    while isinstance(forward, FunctionType) and hasattr(forward, "__wrapped__"):
        if str(forward.__globals__.get("__name__")).partition(".")[0] not in _SEEN_THROUGH:
            return None
        forward = forward.__wrapped__
    return forward if isinstance(forward, FunctionType) else None


def _iterated_list(iterated: ast.expr, module: str) -> str | None:
    """Return the attribute of ``module.attribute``, perhaps a slice of it, or counted; None for anything else."""
    if isinstance(iterated, ast.Call) and ast.unparse(iterated.func) == "enumerate" and len(iterated.args) == 1:
        iterated = iterated.args[0]
    if isinstance(iterated, ast.Subscript) and isinstance(iterated.slice, ast.Slice):
        iterated = iterated.value
    is_attribute = isinstance(iterated, ast.Attribute) and ast.unparse(iterated.value) == module
    return iterated.attr if is_attribute else None  # type: ignore[attr-defined]


def _absent(loop: ast.For, optional: set[str]) -> set[str] | None:
    """Return the parameters without which no statement but the call of a layer has the hidden state.

    None where another one has it in any case.
    """
    layer = ast.unparse(loop.target.elts[-1] if isinstance(loop.target, ast.Tuple) else loop.target)
    calls = [s for s in loop.body if isinstance(s, ast.Assign) and _called(s.value) == layer]
    if len(calls) != 1 or loop.orelse or len(calls[0].targets) != 1:
        return None
    (target,), call = calls[0].targets, calls[0].value
    given, result = call.args[:1], target.elts[0] if isinstance(target, ast.Tuple) else target  # type: ignore
    if not (given and isinstance(given[0], ast.Name) and isinstance(result, ast.Name)):
        return None
    hidden = {given[0].id, result.id}
    others = [*call.args[1:], *(keyword.value for keyword in call.keywords)]  # type: ignore[attr-defined]
    if not hidden.isdisjoint(_names(*others)):
        return None
    takings = {f"{given[0].id} = {result.id}", f"{given[0].id} = {result.id}[0]"}
    absent = set()
    for statement in loop.body:
        if statement is calls[0] or ast.unparse(statement) in takings or not {*hidden, layer} & _names(statement):
            continue
        parameter = _needed(statement)
        if parameter not in optional:
            return None
        absent.add(parameter)
    return absent


def _called(value: ast.expr) -> str | None:
    return value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else None


def _needed(statement: ast.stmt) -> str | None:
    """Return the name of ``if name is not None [and ...]``, without which a statement does nothing."""
    if not isinstance(statement, ast.If) or statement.orelse:
        return None
    test = statement.test
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        test = test.values[0]
    name, _, rest = ast.unparse(test).partition(" ")
    return name if rest == "is not None" else None


def _names(*trees: ast.AST) -> set[str]:
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
