"""What a function and its helpers read of their files: as long as that stays, they compute the same."""

from __future__ import annotations

import enum
import inspect
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.syntax.source_tree import code_names, written_globals
from kernels_ext_npu.transformers_internals import cells, is_kernel_function, original_function

Setting = tuple[dict[str, Any], str, Any]  # globals, a name in them, and what it was
_PURE = ("torch.", "einops.")  # libraries whose functions read nothing that changes
IN_PLACE = "_kernels_in_place_of"  # attribute of a method of ours: the one of the class
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, enum.Enum)


def read_globals(function: FunctionType, cls: type = object) -> tuple[Setting, ...] | None:
    """Return the globals that a function and its helpers read; None if some are written, or no code or constants.

    Methods of a class are helpers, too.
    """
    found: dict[tuple[int, str], Setting] = {}
    for each in reached_functions(function, cls, _PURE):
        # torch's decorators hold what they call, and super() has its class there
        if not all(isinstance(value, (FunctionType, torch.autocast, type)) for value in cells(each).values()):
            return None
        if written_globals(each.__code__):
            return None
        names = each.__globals__
        for name in sorted(code_names(each.__code__) & names.keys()):
            value = _unbound(names[name])
            if not isinstance(value, (FunctionType, BuiltinFunctionType, ModuleType, type, *CONSTANTS)):
                return None
            found[id(names), name] = names, name, value
    return tuple(found.values())


def reached_functions(function: Any, cls: type, libraries: tuple[str, ...]) -> list[FunctionType]:
    """Return a function, and the methods of a class and functions that it may call, but for those of some libraries.

    Of a decorated one that is both what is called, and what that wraps or holds.
    """
    own = [vars(base) for base in cls.__mro__ if base not in (nn.Module, object)]
    found: dict[FunctionType, bool] = {}  # whether it is of none of the libraries
    waiting = [function]
    for value in waiting:  # grows while it runs
        value = value.fget if isinstance(value, property) else value
        if isinstance(value, (FunctionType, staticmethod, classmethod)):
            value = own_method(value)
        if not isinstance(value, FunctionType) or value in found:  # an object of a library may import when it is asked
            continue
        # a wrapper of a library's says that it is of the module of what it wraps
        found[value] = not f"{value.__globals__.get('__name__', '')}.".startswith(libraries)
        waiting += [inspect.unwrap(value), *cells(value).values()]
        if found[value]:
            names = code_names(value.__code__)
            waiting += [members[name] for members in own for name in sorted(names & members.keys())]
            waiting += [_unbound(value.__globals__[name]) for name in sorted(names & value.__globals__.keys())]
    return [each for each, is_own in found.items() if is_own]


def own_method(value: Any) -> Any:
    """Return the function of a method as its class has it, also where one of ours is in its place."""
    own = getattr(getattr(value, "__func__", value), IN_PLACE, value)
    return getattr(own, "__func__", own)


def hold(settings: tuple[Setting, ...]) -> bool:
    """Tell whether what was read is as it was."""
    found = ((names.get(name, names), value) for names, name, value in settings)
    return all(each is value or _unbound(each) is value for each, value in found)


def _unbound(value: Any) -> Any:
    """Return the function of which `kernels` made a module, as a helper that has a kernel of its own; or the value."""
    return original_function(value) if is_kernel_function(value) else value
