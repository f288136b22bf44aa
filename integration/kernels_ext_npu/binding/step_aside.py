"""Forwards of kernels that step aside for what the class of a module computes now, if that is not what was matched.

Somebody may give a class another forward at any time, or a module another class. What was bound to a module hides both,
so it asks, in every call. What the layer does not take, such as a list or a tensor of another shape, is refused as the
class does it, or computed with a warning. What the device refuses, a RuntimeError, is said.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from kernels_ext_npu.binding.loaded_kernels import MATCHED, class_name, marked

_REFUSALS = (AttributeError, IndexError, TypeError, ValueError)  # of what a layer was not written for


@functools.cache
def stepping(forward: FunctionType, matched: FunctionType) -> FunctionType:
    """Return the forward of a layer for modules whose class computes what was matched, by the names of its parameters.

    What it cannot take, as the class perhaps can, it leaves to the class.

    Args:
        forward: the layer's.
        matched: that of the class.
    """
    parameters = list(inspect.signature(forward).parameters.values())
    if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return marked(forward, class_name(forward))  # of a function, whose class nobody knows
    names = {theirs: ours.name for theirs, ours in zip(inspect.signature(matched).parameters, parameters)}

    @functools.wraps(forward)
    def stepping_aside(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if type(self).forward is not matched or (kwargs and not kwargs.keys() <= names.keys()):
            return _now(self, stepping_aside, matched)(self, *args, **kwargs)
        try:
            return forward(self, *args, **({names[n]: value for n, value in kwargs.items()} if kwargs else kwargs))
        except _REFUSALS as error:
            refused = error
        return _left_to(matched, refused, self, *args, **kwargs)

    setattr(stepping_aside, MATCHED, matched)
    return marked(stepping_aside, class_name(forward))  # type: ignore[arg-type]


def _left_to(matched: FunctionType, error: Exception, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute what a layer has refused as the class of its module does, which may refuse it, too."""
    result = matched(module, *args, **kwargs)
    warnings.warn(f"{type(module).__name__} computed this without its kernel, which refused it: {error}", stacklevel=3)
    return result


def steps_aside(module: nn.Module) -> bool:
    """Tell whether a module has a forward from here, and its class computes something else now."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return getattr(function, MATCHED, type(module).forward) is not type(module).forward


def _now(module: nn.Module, stepping: Callable, matched: FunctionType) -> Any:
    """Return what computes when a module without kernels is called.

    What was put over the module's forward holds what the class had then, whatever it was given later.
    """
    bound = module.__dict__.get("forward")
    return type(module).forward if getattr(bound, "__func__", None) is stepping else matched
