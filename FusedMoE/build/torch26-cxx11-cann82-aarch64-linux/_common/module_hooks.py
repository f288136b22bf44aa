"""Whether a call of a module does more than its forward."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

_CALL = nn.Module._wrapped_call_impl  # torch's own, whatever somebody has put in its place


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module or all modules have hooks, or its class another call than torch's."""
    members = module.__dict__  # an attribute of a module takes longer to find, and every forward asks
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
