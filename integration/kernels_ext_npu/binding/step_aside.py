"""Forwards of kernels that step aside for what the class of a module computes now, if that is not what was matched.

Somebody may give a class another forward at any time, or a module another class. What was bound to a module hides both,
so it asks, in every call, and of some classes for members that decide what they compute. What the layer does not take,
such as a list or a tensor of another shape, is refused as the class does it, or computed with a warning. What the
device refuses, a RuntimeError, is said.
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

_REFUSALS = (AttributeError, LookupError, TypeError, ValueError)  # of what a layer was not written for


@functools.cache
def guarded_forward(
    forward: FunctionType, matched: FunctionType, holds: Callable[[Any], bool] | None = None
) -> FunctionType:
    """Return the forward of a layer for modules whose class computes what was matched, by the names of its parameters.

    What it cannot take, as the class perhaps can, it leaves to the class, and modules of which something does not hold.
    """
    parameters = list(inspect.signature(forward).parameters.values())
    if any(parameter.kind is not parameter.POSITIONAL_OR_KEYWORD for parameter in parameters):
        return marked(forward, class_name(forward))  # of a function, whose class nobody knows
    names = {theirs: ours.name for theirs, ours in zip(inspect.signature(matched).parameters, parameters)}

    @functools.wraps(forward)
    def guarded(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        is_other = type(self).forward is not matched or (kwargs and not kwargs.keys() <= names.keys())
        if is_other or (holds is not None and not holds(self)):
            # what was put over the module's forward holds what the class had then, whatever it was given later
            is_uncovered = getattr(self.__dict__.get("forward"), "__func__", None) is guarded
            return (type(self).forward if is_uncovered else matched)(self, *args, **kwargs)  # type: ignore[arg-type]
        try:
            return forward(self, *args, **({names[n]: value for n, value in kwargs.items()} if kwargs else kwargs))
        except _REFUSALS as error:
            refused = error
        result = matched(self, *args, **kwargs)  # which may refuse it, too
        name = type(self).__name__
        warnings.warn(f"{name} computed this without its kernel, which refused it: {refused}", stacklevel=2)
        return result

    setattr(guarded, MATCHED, matched)
    return marked(guarded, class_name(forward))  # type: ignore[arg-type]


def is_outdated(module: nn.Module) -> bool:
    """Tell whether a module has a forward from here, and its class computes something else now."""
    function = getattr(module.__dict__.get("forward"), "__func__", None)
    return getattr(function, MATCHED, type(module).forward) is not type(module).forward
