"""What a function and its helpers read of their files: as long as that stays, they compute the same."""

from __future__ import annotations

import enum
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.syntax.source_tree import code_names, written_globals
from kernels_ext_npu.transformers_internals import cells, is_kernel_function, original_function

Setting = tuple[dict[str, Any], str, Any]  # globals, a name in them, and what it was
_PURE = ("torch", "einops")  # libraries whose functions read nothing that changes
IN_PLACE = "_kernels_in_place_of"  # attribute of a method of ours: the one of the class
CONSTANTS = (bool, int, float, str, type(None), torch.dtype, enum.Enum)


def read_globals(function: FunctionType, cls: type = object) -> tuple[Setting, ...] | None:
    """Return the globals that a function and its helpers read; None if some are written, or no code or constants.

    Methods of a class are helpers, too.
    """
    own = [vars(base) for base in cls.__mro__ if base not in (nn.Module, object)]
    found: dict[tuple[int, str], Setting] = {}
    waiting = [function]
    for each in waiting:  # grows while it runs
        held = list(cells(each).values())  # torch's decorators hold what they call, and super() has its class there
        if not all(isinstance(value, (FunctionType, torch.autocast, type)) for value in held):
            return None
        if written_globals(each.__code__):
            return None
        names, read = each.__globals__, code_names(each.__code__)
        methods = [members[name] for members in own for name in read & members.keys()]
        helpers = [*held, *map(own_method, methods)]
        for name in sorted(read & names.keys()):
            value = _unbound(names[name])
            if not isinstance(value, (FunctionType, BuiltinFunctionType, ModuleType, type, *CONSTANTS)):
                return None
            found[id(names), name] = names, name, value
            helpers.append(value)
        functions = [helper for helper in dict.fromkeys(helpers) if isinstance(helper, FunctionType)]
        waiting += [h for h in functions if h not in waiting and h.__module__.partition(".")[0] not in _PURE]
    return tuple(found.values())


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
