"""What a function and its helpers read of their files: as long as that stays, they compute the same."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch

from kernels_ext_npu.transformers_internals import cells, is_kernel_function, original_function

Setting = tuple[dict[str, Any], str, Any]  # globals, a name in them, and what it was
_PURE = ("torch", "einops")  # libraries whose functions read nothing that changes
CONSTANTS = (bool, int, float, str, type(None), torch.dtype)


def read_globals(function: FunctionType) -> tuple[Setting, ...] | None:
    """Return the globals that a function and its helpers read; None if some are neither code nor constants."""
    found: dict[tuple[int, str], Setting] = {}
    waiting = [function]
    for each in waiting:  # grows while it runs
        held = cells(each).values()  # torch's decorators hold what they call
        if not all(isinstance(value, (FunctionType, torch.autocast)) for value in held):
            return None
        waiting += [value for value in held if isinstance(value, FunctionType) and value not in waiting]
        names = each.__globals__
        for name in sorted(_names(each.__code__) & names.keys()):
            value = _unbound(names[name])
            if not isinstance(value, (FunctionType, BuiltinFunctionType, ModuleType, type, *CONSTANTS)):
                return None
            found[id(names), name] = names, name, value
            if isinstance(value, FunctionType) and value.__module__.partition(".")[0] not in _PURE:
                waiting += [value] if value not in waiting else []
    return tuple(found.values())


def hold(settings: tuple[Setting, ...]) -> bool:
    """Tell whether what was read is as it was."""
    found = ((names.get(name, names), value) for names, name, value in settings)
    return all(each is value or _unbound(each) is value for each, value in found)


def _unbound(value: Any) -> Any:
    """Return the function of which `kernels` made a module, as a helper that has a kernel of its own; or the value."""
    return original_function(value) if is_kernel_function(value) else value


def _names(code: Any) -> set[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, type(code))]
    return set(code.co_names).union(*inner)
