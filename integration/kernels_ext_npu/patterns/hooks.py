"""Whether somebody watches the calls of a module, which a kernel that computes more than it would pass by."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

CALL = nn.Module._wrapped_call_impl  # torch's own, whatever somebody has put in its place
_OF_ALL = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks)


def has_hooks(module: object) -> bool:
    """Tell whether a module, or all modules, have hooks that its calls would run. A function has none."""
    if not isinstance(module, nn.Module):
        return False
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or all_have_hooks()


def all_have_hooks() -> bool:
    """Tell whether there are hooks that the calls of all modules run, also of one that is made for a call."""
    return any(_OF_ALL) or nn.Module.__call__ is not CALL
