"""Whether a call of a module does more than its class says."""

from __future__ import annotations

from types import MethodType

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

_CALL = nn.Module._wrapped_call_impl  # torch's own, whatever somebody has put in its place


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
