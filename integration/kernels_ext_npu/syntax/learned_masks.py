"""Masks in which there is something that a module has learned: found by the syntax tree of its forward.

Swin's attention adds a table of biases to the mask of its windows, BEiT's layers hand theirs to their attention as a
mask, Doge's attention computes one from its values.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any

from torch import nn

from kernels_ext_npu.syntax.source_tree import function_tree

_MASK_OF_ATTENTION = 4  # its place in a call of an attention function: module, query, key, value, mask
_TORCH = re.compile(r"(torch|nn|F)\b")
_HAVING_VALUES = re.compile("(add|sub|mul|where|masked_fill)_?")  # methods whose arguments' values are in the result
_WITHOUT_VALUES = re.compile("new_.*|.*_like|finfo|size")
_VIEWS = {"T", "mT", "data"}
_ASSIGNMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign)
_DEPTH = 3  # how deep called functions are followed

Sources = frozenset[str]  # attributes of a module that a value is made of
_NOTHING: Sources = frozenset()


def has_learned_mask(model: nn.Module, path: str) -> bool:
    """Tell whether an attention, or a module around it, hands on a mask that its parameters have a part in."""
    names = path.split(".") if path else []
    for depth in range(len(names) + 1):
        module = model.get_submodule(".".join(names[:depth]))
        to_modules, to_attention = _sources_of_masks(type(module))  # type: ignore[arg-type]
        sources = to_attention if depth == len(names) else to_modules
        if any(_is_learned(getattr(module, name, None)) for name in sources):
            return True
    return False


def _is_learned(value: object) -> bool:
    has_parameters = isinstance(value, nn.Module) and next(value.parameters(), None) is not None
    return has_parameters or isinstance(value, nn.Parameter)


@cache
def _sources_of_masks(cls: type[nn.Module]) -> tuple[Sources, Sources]:
    """Return the sources of the masks that a forward hands to modules, and of those for attention functions."""
    forward: Any = inspect.unwrap(cls.forward)
    tree = function_tree(forward)
    if tree is None:
        return _NOTHING, _NOTHING
    flow = _Flow(cls, tree, forward.__globals__, {})
    return flow.to_modules, flow.to_attention


class _Flow:
    """Follows attributes of a module through a function, line by line; both ways of a branch count."""

    def __init__(
        self, cls: type, tree: ast.FunctionDef, names: dict[str, Any], given: Mapping[str, Sources], depth: int = 0
    ) -> None:
        self._cls, self._globals, self._depth = cls, names, depth
        self._values = dict(given)
        self.to_modules = self.to_attention = self.returned = _NOTHING
        for node in _in_order(tree):
            self._see(node)

    def _see(self, node: ast.AST) -> None:
        if isinstance(node, ast.Call):
            self._note_masks(node)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned |= self._sources(node.value)
        elif isinstance(node, _ASSIGNMENTS) and node.value is not None:
            found = self._sources(node.value)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]:
                if isinstance(name.ctx, ast.Store):
                    self._values[name.id] = self._values.get(name.id, _NOTHING) | found

    def _note_masks(self, call: ast.Call) -> None:
        is_attention = bool(call.args) and isinstance(call.args[0], ast.Name) and call.args[0].id == "self"
        given = [value for name, value in _named(call) if "mask" in name]
        if is_attention:
            given += call.args[_MASK_OF_ATTENTION : _MASK_OF_ATTENTION + 1]
            self.to_attention = self.to_attention.union(*map(self._sources, given))
        elif _is_own(call.func) or (isinstance(call.func, ast.Name) and call.func.id not in self._globals):
            self.to_modules = self.to_modules.union(*map(self._sources, given))

    def _sources(self, node: ast.AST) -> Sources:
        """Return the attributes that the value of an expression is made of."""
        if isinstance(node, ast.Name):
            return self._values.get(node.id, _NOTHING)
        if isinstance(node, ast.Attribute):
            own = frozenset({node.attr}) if _is_own(node) else _NOTHING
            return own | (self._sources(node.value) if node.attr in _VIEWS else _NOTHING)
        if isinstance(node, ast.Call):
            return self._call_sources(node)
        if isinstance(node, (ast.Compare, ast.BoolOp)):  # yes or no
            return _NOTHING
        if isinstance(node, ast.Subscript):
            return self._sources(node.value)
        parts = [node.body, node.orelse] if isinstance(node, ast.IfExp) else ast.iter_child_nodes(node)
        return _NOTHING.union(*map(self._sources, parts))

    def _call_sources(self, call: ast.Call) -> Sources:
        function, arguments = call.func, [*map(self._sources, call.args)]
        values = _NOTHING.union(*arguments, *(self._sources(keyword.value) for keyword in call.keywords))
        if isinstance(function, ast.Name):
            return self._returned_by(self._globals.get(function.id), call)
        if not isinstance(function, ast.Attribute) or _WITHOUT_VALUES.fullmatch(function.attr):
            return _NOTHING
        if _is_own(function):
            method = getattr(self._cls, function.attr, None)
            return self._returned_by(method, call) if inspect.isroutine(method) else values | {function.attr}
        if _TORCH.match(ast.unparse(function)):
            return values
        return self._sources(function.value) | (values if _HAVING_VALUES.fullmatch(function.attr) else _NOTHING)

    def _returned_by(self, function: object, call: ast.Call) -> Sources:
        """Return the sources of what a function of the same file, or a method, returns."""
        function = inspect.unwrap(function) if callable(function) else None
        if not isinstance(function, FunctionType) or function.__globals__ is not self._globals:
            return _NOTHING
        names = [name for name in inspect.signature(function).parameters if name != "self"]
        given = {name: self._sources(value) for name, value in (*zip(names, call.args), *_named(call))}
        tree = function_tree(function) if self._depth + 1 < _DEPTH else None
        return _NOTHING if tree is None else _Flow(self._cls, tree, self._globals, given, self._depth + 1).returned


def _in_order(tree: ast.FunctionDef) -> list[Any]:
    """Return the calls and statements of a function that hand values on, as they run: the inner ones first."""
    nodes = [node for node in ast.walk(tree) if isinstance(node, (ast.Call, ast.Return, *_ASSIGNMENTS))]
    nodes.reverse()  # of two that end at one place the inner one is behind the outer one
    return sorted(nodes, key=attrgetter("end_lineno", "end_col_offset"))


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _named(call: ast.Call) -> list[tuple[str, ast.expr]]:
    """Return the arguments that have a name: their own, or that of the variable that is given."""
    own = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
    return own + [(value.id, value) for value in call.args if isinstance(value, ast.Name)]
