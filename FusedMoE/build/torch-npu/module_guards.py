"""Whether a call of a module does more than its class says, or something else than when it was met."""

from __future__ import annotations

from types import FunctionType, MethodType
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

_CALL = nn.Module._wrapped_call_impl  # torch's own, whatever somebody has put in its place
# what modules computed when they were met, which are computed without a call: as `_forward_of` tells it
_met: WeakKeyDictionary[nn.Module, object] = WeakKeyDictionary()


def is_watched(module: nn.Module) -> bool:
    """Tell whether a module, or all modules, have hooks, or a wrapped forward or call.

    `kernels` binds forwards as methods.
    """
    members = module.__dict__
    forward = members.get("forward")
    if forward is not None and not (isinstance(forward, MethodType) and forward.__self__ is module):
        return True
    # one after the other: this runs for every projection in every forward
    return bool(
        type(module).__call__ is not _CALL
        or members["_forward_hooks"]
        or members["_forward_pre_hooks"]
        or members["_backward_hooks"]
        or members["_backward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    )


def remember_forward(module: nn.Module, own: FunctionType | None = None) -> None:
    """Take what the class of a module, or of those in a list, computes now for what is computed without a call.

    Args:
        module: the module, or the list.
        own: a forward that computes the same and that each of them may have of its own.
    """
    _met[module] = type(_parts(module)[0]).forward, own


def is_replaced(module: nn.Module) -> bool:
    """Tell whether a module, or one of a list, computes something else than when it was met, now if it never was.

    A compiler does not see what was met.
    """
    if torch.compiler.is_compiling():
        return False
    parts = _parts(module)
    met = _met.setdefault(module, _forward_of(parts[0]))
    return any(_forward_of(part) != met for part in parts)


def _parts(module: nn.Module) -> list[nn.Module]:
    return list(module._modules.values()) if isinstance(module, nn.ModuleList) else [module]  # type: ignore[arg-type]


def _forward_of(module: nn.Module) -> tuple[object, object]:
    """Return the forward of a module's class, and the function that it has in its place, or None."""
    return type(module).forward, getattr(module.__dict__.get("forward"), "__func__", None)
