"""Whether the forward of a submodule may be passed by: nobody listens to its calls, and it is what it was."""

from __future__ import annotations

from types import FunctionType, MethodType
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ._common.modules import has_hooks

# of modules that are computed without a call, what their class and they themselves had as a forward at first
_remembered: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()
# the same by class: what a compiler can look up, and then watches
_remembered_by_class: dict[type[nn.Module], object] = {}


def is_intercepted(module: nn.Module) -> bool:
    """Tell whether a call of a module runs what others have put there: hooks, or a wrapped forward or call.

    `kernels` binds forwards as methods, which wrap nothing.
    """
    forward = module.__dict__.get("forward")
    if forward is not None and not (isinstance(forward, MethodType) and forward.__self__ is module):
        return True
    return has_hooks(module)


def remember_forward(module: nn.Module, own: FunctionType | None = None) -> None:
    """Remember the forward of the class of a module, or of the modules in a list, as the one that a kernel computes.

    Args:
        module: the module, or the list.
        own: a forward that computes the same and that each of them may have of its own.
    """
    cls = type(_modules(module)[0])
    _remembered[module] = _remembered_by_class[cls] = cls.forward, own


def is_replaced(module: nn.Module) -> bool:
    """Tell whether a module, or one of a list, has another forward than is remembered, which is now if none is.

    A compiler sees what is remembered of classes alone, and those that inherit of them count as they do.
    """
    modules = _modules(module)
    if torch.compiler.is_compiling():
        return any(
            cls in _remembered_by_class and _remembered_by_class[cls] != _forwards(each)
            for each in modules
            for cls in type(each).__mro__
        )
    remembered = _remembered.setdefault(module, _forwards(modules[0]))
    return any(_forwards(each) != remembered for each in modules)


def _modules(module: nn.Module) -> list[nn.Module]:
    return list(module._modules.values()) if isinstance(module, nn.ModuleList) else [module]  # type: ignore[arg-type]


def _forwards(module: nn.Module) -> tuple[object, object]:
    """Return the forward of a module's class, and the function that it has in its place, or None."""
    return type(module).forward, getattr(module.__dict__.get("forward"), "__func__", None)
