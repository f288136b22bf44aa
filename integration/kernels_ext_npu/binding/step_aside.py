"""Forwards of kernels that fall back to the forward of the module's class.

They do where the class has another forward by now, or the module another class, both of which a bound forward hides;
where a member that decides what is computed was changed; for more arguments than the layer has; and for arguments that
the layer does not take, such as a list or a tensor of another shape, with a warning unless the class refuses them too.
A RuntimeError, as a device raises it, goes to the caller, but for that of a graph which is exported and does not know
how many values there are, and of torch where an operator is not for tensors of a kind.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from kernels_ext_npu.binding.loaded_kernels import MATCHED, class_forward, class_name, marked

_METHODS = "_kernels_methods"  # attribute of our forwards: the methods with which that of the class was matched
_REFUSALS = (AttributeError, LookupError, TypeError, ValueError)  # what layers raise for arguments they do not take
_UNKNOWN_SIZE = "GuardOnDataDependentSymNode"  # of torch.fx.experimental.symbolic_shapes
_NO_OPERATOR = "Could not run 'npu::"  # torch's words for tensors of another kind, such as nested ones


@functools.cache
def guarded_forward(
    forward: FunctionType,
    matched: FunctionType,
    holds: Callable[[Any], bool] | None = None,
    methods: tuple[tuple[str, Any], ...] = (),
) -> FunctionType:
    """Wrap a layer's forward so that it falls back to the class's where that changed, or a guard or the layer refuses.

    Args:
        forward: that of the layer.
        matched: the forward of the class that was matched, after whose parameters callers name their arguments.
        holds: the guard, asked of the module in each call; None if there is none.
        methods: those of the class that it was matched with, by their names.
    """
    parameters = list(inspect.signature(forward).parameters.values())
    if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return marked(forward, class_name(forward))  # a function's layer: its module has no class of transformers
    most = len(parameters) - 1  # arguments beside the module
    names = {theirs: ours.name for theirs, ours in zip(inspect.signature(matched).parameters, parameters)}

    @functools.wraps(forward)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_more = args[most:] or (kwargs and not kwargs.keys() <= names.keys())
        is_other = type(self).forward is not matched or is_more
        for method, value in methods:  # here, since to ask a function takes longer
            is_other = is_other or getattr(type(self), method, None) is not value
        if is_other or (holds is not None and not holds(self)):
            return class_forward(self, guarded, matched)(self, *args, **kwargs)
        try:
            return forward(self, *args, **({names[n]: value for n, value in kwargs.items()} if kwargs else kwargs))
        except _REFUSALS as error:
            refused = str(error)
        except RuntimeError as error:
            if type(error).__name__ == _UNKNOWN_SIZE:
                return matched(self, *args, **kwargs)
            if not str(error).startswith(_NO_OPERATOR):
                raise
            refused = "its operator is not for tensors of this kind"
        result = matched(self, *args, **kwargs)  # which may refuse it, too
        name = type(self).__name__
        warnings.warn(f"{name} computed this without its kernel, which refused it: {refused}", stacklevel=2)
        return result

    guarded.__code__ = _own_code(guarded.__code__, matched)  # type: ignore[attr-defined]
    setattr(guarded, MATCHED, matched)
    setattr(guarded, _METHODS, methods)
    return marked(guarded, class_name(forward))  # type: ignore[arg-type]


@functools.cache
def _own_code(code: CodeType, matched: FunctionType) -> CodeType:
    """Return a copy of code for the modules whose class has this forward, which has code of its own, too.

    torch.compile makes only a few graphs of one code, whatever functions have it.
    """
    return code.replace()


def is_outdated(module: nn.Module) -> bool:
    """Tell whether a module has such a forward, and its class has another one, or other methods, than was matched."""
    function, cls = getattr(module.__dict__.get("forward"), "__func__", None), type(module)
    if getattr(function, MATCHED, cls.forward) is not cls.forward:
        return True
    return any(getattr(cls, name, None) is not value for name, value in getattr(function, _METHODS, ()))
