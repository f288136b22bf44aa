"""Forwards of kernels that step aside for what the class of a module computes now, if that is not what was matched.

Somebody may give a class another forward at any time, or a module another class. What was bound to a module hides both,
so it asks, in every call. It asks by a line of its own: of a layer

    def forward(self, hidden_states):
        return norm(hidden_states, self.weight, self.eps)

and a class whose forward takes ``x`` it is

    def forward(self, x, *args, **kwargs):
        if type(self).forward is not matched or args or kwargs:
            return now(self, forward, matched)(self, x, *args, **kwargs)
        hidden_states = x
        try:
            return norm(hidden_states, self.weight, self.eps)
        except (AttributeError, IndexError, TypeError, ValueError) as error:
            refused = error
        return left_to(matched, refused, self, x)

so that what the layer does not take, such as a list or a tensor of another shape, is refused as the class does it, or
computed with a warning. What the device refuses, a RuntimeError, is said. A function around the layer would ask the
same for a call of Python more in every layer of every step.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import warnings
from types import FunctionType
from typing import Any

from torch import nn

from kernels_ext_npu.binding.loaded_kernels import MATCHED, class_name, marked
from kernels_ext_npu.matching.source_tree import maker

_NOW, _ARGS, _KWARGS = "_kernels_now", "_kernels_args", "_kernels_kwargs"
_REFUSED, _ERROR, _LEFT_TO = "_kernels_refused", "_kernels_error", "_kernels_left_to"
_OF_LAYER = "_kernels_layers_"
_REFUSALS = (AttributeError, IndexError, TypeError, ValueError)  # of what a layer was not written for


@functools.cache
def stepping(forward: FunctionType, matched: FunctionType) -> FunctionType:
    """Return the forward of a layer for modules whose class computes what was matched, by the names of its parameters.

    What it cannot take, as the class perhaps can, it leaves to the class.

    Args:
        forward: the layer's.
        matched: that of the class.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    assert isinstance(tree, ast.FunctionDef)
    if tree.args.vararg or tree.args.kwarg or tree.args.kwonlyargs:
        return marked(forward, class_name(forward))  # of a function, whose class nobody knows
    me, *given = [argument.arg for argument in tree.args.args]
    _rename(tree.body, given)
    _, *names = inspect.signature(matched).parameters
    renamed = dict(zip(given, names)) if len(given) == len(names) else {}
    for argument in tree.args.args[1:]:
        argument.arg = renamed.get(argument.arg, argument.arg)
    tree.args.vararg, tree.args.kwarg = ast.arg(_ARGS), ast.arg(_KWARGS)
    taken = ", ".join([me, *(argument.arg for argument in tree.args.args[1:])])
    called = f"{taken}, *{_ARGS}, **{_KWARGS}"
    lines = [
        f"if type({me}).forward is not {MATCHED} or {_ARGS} or {_KWARGS}:",
        f"    return {_NOW}({me}, forward, {MATCHED})({called})",
        *(f"{_OF_LAYER}{name} = {renamed.get(name, name)}" for name in given),
    ]
    tried: Any = ast.parse(f"try:\n    pass\nexcept {_REFUSED} as error:\n    {_ERROR} = error").body[0]
    tried.body = tree.body
    last = ast.parse(f"return {_LEFT_TO}({MATCHED}, {_ERROR}, {taken})").body
    tree.body = [*ast.parse("\n".join(lines)).body, tried, *last]
    make = maker(tree, forward, (MATCHED, _NOW, _REFUSED, _LEFT_TO))
    new = functools.wraps(forward)(make(matched, _now, _REFUSALS, _left_to))
    setattr(new, MATCHED, matched)
    return marked(new, class_name(forward))  # type: ignore[arg-type]


def _rename(body: list[ast.stmt], parameters: list[str]) -> None:
    """Give the parameters and variables of a layer names of their own: the class is handed what was given."""
    found = [node for statement in body for node in ast.walk(statement) if isinstance(node, ast.Name)]
    mine = {*parameters, *(node.id for node in found if isinstance(node.ctx, ast.Store))}
    for node in found:
        if node.id in mine:
            node.id = f"{_OF_LAYER}{node.id}"


def _left_to(matched: FunctionType, error: Exception, module: nn.Module, *args: Any) -> Any:
    """Compute what a layer has refused as the class of its module does, which may refuse it, too."""
    result = matched(module, *args)
    warnings.warn(f"{type(module).__name__} computed this without its kernel, which refused it: {error}", stacklevel=3)
    return result


def steps_aside(module: nn.Module) -> bool:
    """Tell whether a module has a forward from here, and its class computes something else now."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return getattr(function, MATCHED, type(module).forward) is not type(module).forward


def _now(module: nn.Module, stepping: FunctionType, matched: FunctionType) -> Any:
    """Return what computes when a module without kernels is called.

    What was put over the module's forward holds what the class had then, whatever it was given later.
    """
    bound = module.__dict__.get("forward")
    return type(module).forward if getattr(bound, "__func__", None) is stepping else matched
