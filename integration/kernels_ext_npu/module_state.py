"""What can be seen of a module of torch without running its code: hooks on its calls, and what it holds under a name.

A kernel that computes more than one module passes by the calls of those inside, and with them their hooks. To read a
parametrized weight runs code: a spectral norm takes a step when its weight is read in training, and an observer counts
the reads.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

TORCH_CALL = nn.Module._wrapped_call_impl  # torch's own `__call__`, whatever somebody has put in its place
_GLOBAL_HOOKS = (_global_forward_hooks, _global_forward_pre_hooks, _global_backward_hooks, _global_backward_pre_hooks)
COMPUTED: Final = object()  # stands for what a class makes when it is asked, such as a parametrized weight


def written_class(cls: type) -> Any:
    """Return a class without what torch.distributed puts in front of it, as FSDP2 does with what it shards."""
    for base in cls.__mro__:
        if not base.__module__.startswith("torch.distributed."):
            return base
    return cls


def has_hooks(module: object) -> bool:
    """Tell whether calls of a module run hooks, its own or those of all modules. A function has none."""
    if not isinstance(module, nn.Module):
        return False
    own = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return any(own) or all_have_hooks()


def all_have_hooks() -> bool:
    """Tell whether there are hooks that the calls of all modules run, also of one that is made for a call."""
    return any(_GLOBAL_HOOKS) or nn.Module.__call__ is not TORCH_CALL


def static_getattr(module: nn.Module, name: str) -> Any:
    """Return what a module holds under a name: None if nothing, and `COMPUTED` where reading it would compute it."""
    on_class = inspect.getattr_static(type(module), name, None)
    if inspect.isdatadescriptor(on_class):
        return COMPUTED
    for place in (module._parameters, module._buffers, module._modules, vars(module)):
        if name in place:
            return place[name]
    return on_class


def child_at(module: Any, path: str) -> Any:
    """Return the child of a module, or of a container in it."""
    for name in path.split("."):
        module = module._modules[name]
    return module
