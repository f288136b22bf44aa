"""Fingerprints of forwards and functions, which are equal where the normalised syntax trees are.

Compared is the function together with the methods of its class and the functions of its file that it calls, without
docstrings, annotations, the names of local variables and of helpers, and a name for what could be returned at once.
Attributes, constants, the order of operations and the objects behind global names all count; of a
torch.autograd.Function its forward and backward do. So do the names of the parameters, by which callers may give them,
but for those of a forward. Some methods do not, of which conditions on instances tell more. What a decorator does is
not in the tree: only functions under those that transformers_internals.py sees through match, where both sides have
them, but for the one that takes old names of parameters. transformers' decorator of experts says itself what a class
computes.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import zlib
from collections.abc import Collection
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from kernels_ext_npu.syntax.source_tree import code_names, function_tree
from kernels_ext_npu.transformers_internals import (
    RENAMES,
    allowed_decorators,
    cells,
    original_function,
    undecorated,
)

# methods that are not compared: instances are asked what they do, or are served where they do not call them
_NOT_COMPARED = {"recomposition_frequencies", "_gaussian_topk", "apply_group_scoring"}

_SHOWN: dict[str, Any] = {"show_empty": True} if sys.version_info >= (3, 13) else {}  # older ones always do


def fingerprint(what: object) -> str | None:
    """Return the fingerprint of a class, a function, or the module that `kernels` made of one.

    It is the same in all versions of Python, and None if the source cannot be read.
    """
    if isinstance(what, type):
        forward = getattr(what, "forward", None)
        if not isinstance(forward, FunctionType):
            return None
        methods = compared_methods(what, forward)
        return _fingerprint(forward, (), what, class_methods(what, methods) if methods else ())
    original = original_function(what)
    return None if original is None else _fingerprint(original, allowed_decorators(what), None, ())


def computes_as(what: object, other: object) -> bool:
    """Tell whether the forward of a class, or a function, does what that of another does."""
    found = fingerprint(what) if names_hash(what) == names_hash(other) else None
    return found is not None and found == fingerprint(other)


@use_experts_implementation
class _Experts(nn.Module):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Give the forward its signature: the decorator puts its own in place."""


def is_experts_class(cls: type) -> bool:
    """Tell whether the forward of a class calls the experts implementation that the config names.

    It has to take it out of transformers' own table of them.
    """
    forward = getattr(cls, "forward", None)
    if not isinstance(forward, FunctionType) or forward.__code__ is not _Experts.forward.__code__:
        return False
    return cells(forward)["experts_interface"] is ALL_EXPERTS_FUNCTIONS


@cache
def compared_methods(cls: type, _: FunctionType) -> frozenset[str]:
    """Return the methods that the forward of a class, as it is now, names, and with which it is compared."""
    names = _names(cls) - _NOT_COMPARED - vars(nn.Module).keys()
    return frozenset([name for name in names if isinstance(inspect.getattr_static(cls, name, None), FunctionType)])


def class_methods(cls: type, names: Collection[str]) -> tuple[tuple[str, Any], ...]:
    """Return methods by their names, as a class has them now."""
    return tuple([(name, getattr(cls, name)) for name in sorted(names)])


def names_hash(what: object) -> str:
    """Return a hash of the attributes and global names in the code of a forward or a function.

    It is equal where fingerprints are, and known without reading the source, which takes far longer. The names of
    functions of its file, which do not count, are not among them.
    """
    return f"{zlib.crc32(' '.join(sorted(_names(what))).encode()):08x}"


def _names(what: object) -> frozenset[str]:
    if isinstance(what, type):
        function = getattr(what, "forward", None)
        if hasattr(function, "__wrapped__") and isinstance(function, FunctionType):
            function = undecorated(function)[0]
    else:
        function = what if isinstance(what, FunctionType) else original_function(what)
    if not isinstance(function, FunctionType):
        return frozenset()
    names, own = code_names(function.__code__), function.__globals__
    values = [(name, own.get(name)) for name in names]
    return names - {n for n, v in values if isinstance(v, FunctionType) and v.__module__ == function.__module__}


@cache
def _fingerprint(
    function: FunctionType, decorators: tuple[str, ...], cls: type | None, _: tuple[tuple[str, Any], ...]
) -> str | None:
    texts: list[str] = []
    functions = [function]
    by_name = set() if cls else {function}  # what is called with the names of its parameters
    for each in functions:  # grows while it runs
        inner, under = undecorated(each)
        tree = function_tree(inner)
        if tree is None or set(inner.__code__.co_freevars) - {"__class__"}:
            return None
        found = tuple([ast.unparse(decorator).partition("(")[0] for decorator in tree.decorator_list])
        if not (set(found) <= set(under) or (each is function and found == decorators)):
            return None
        counted = sorted([name for name in under if name != RENAMES])
        texts.append(f"{counted} {_normalised(tree, inner, cls, functions, by_name)}")
    texts += [str(list(inspect.signature(each).parameters)) if each in by_name else "" for each in functions]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _normalised(tree: ast.FunctionDef, function: FunctionType, cls: type | None, functions: list, by_name: set) -> str:
    """Return a tree with numbers for local variables and for functions, to which those that it calls are added."""
    _Simplified().visit(tree)
    tree.name, tree.decorator_list = "_", []
    receiver = tree.args.args[0].arg if cls is not None and tree.args.args else None
    nodes = list(ast.walk(tree))  # a parent before its children
    local = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    # what an expression names: a function of the file, or a method of the class
    callees: dict[ast.AST, object] = {
        node: value
        for node in nodes
        if isinstance(node, ast.Name) and node.id not in local
        if isinstance(value := function.__globals__.get(node.id), FunctionType)
        if value.__module__ == function.__module__
    }
    callees |= {
        node: value
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == receiver
        if node.attr not in _NOT_COMPARED and node.attr not in vars(nn.Module)
        if isinstance(value := inspect.getattr_static(cls, node.attr, None), FunctionType)
    }
    numbers: dict[str, str] = {}
    objects = set()
    for node in nodes:
        if isinstance(node, ast.Call) and node.keywords:
            by_name.add(callees.get(node.func))
        elif isinstance(node, ast.arg):
            node.arg = numbers.setdefault(node.arg, str(len(numbers)))
        elif isinstance(node, ast.Name) and node.id in local:
            node.id = numbers.setdefault(node.id, str(len(numbers)))
        elif (called := callees.get(node)) is not None:
            if called not in functions:
                functions.append(called)
            if isinstance(node, ast.Name):
                node.id = f"function {functions.index(called)}"
        elif isinstance(node, ast.Name) and node.id in function.__globals__:
            objects.add(f"{node.id}={_describe(function.__globals__[node.id])}")
    dumped = ast.dump(tree, **_SHOWN).replace(", type_params=[]", "")  # which Python has since 3.12
    return f"{dumped} {sorted(objects)}"


def _describe(value: object) -> str:
    """Describe an object so that those differ that go by the same name in two files."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, type) and issubclass(value, torch.autograd.Function):
        return f"{fingerprint(value.forward)} {fingerprint(value.backward)}"
    if isinstance(value, (int, float, str)):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


class _Simplified(ast.NodeTransformer):
    """The removal of docstrings, annotations, and names for what could be returned at once."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:]
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        self.generic_visit(node)
        match node.body[-2:]:
            case [ast.Assign([ast.Name(name)], value), ast.Return(ast.Name(returned))] if name == returned:
                node.body[-2:] = [ast.Return(value)]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return node.value and ast.Assign([node.target], node.value)
