"""Modules: what layers say of themselves, whether a call does more than a forward, what an activation computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.utils._python_dispatch import _disable_current_modes

CALL = nn.Module._wrapped_call_impl  # torch's own, whatever somebody has put in its place


class Layer(nn.Module):
    """Says of all layers what `kernels` wants to know of them; it allows no members beyond these two."""

    can_torch_compile = True
    has_backward = True


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module or all modules have hooks, or its class another call than torch's."""
    members = module.__dict__  # an attribute of a module takes longer to find, and every forward asks
    return bool(
        type(module).__call__ is not CALL
        or members["_forward_hooks"]
        or members["_forward_pre_hooks"]
        or members["_backward_hooks"]
        or members["_backward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    )


def has_values(activation: nn.Module, function: Callable[[Tensor], Tensor]) -> bool:
    """Compare an activation with a function, on the host. One with parameters of its own is another function."""
    if any(True for _ in (*activation.parameters(), *activation.buffers())):
        return False
    with _disable_current_modes(), torch.no_grad():  # with fake tensors there would be no values
        grid = torch.linspace(-9, 9, 181, device="cpu")
        try:
            values = activation.forward(grid.clone())  # not its hooks
        except Exception:  # it wants something else than one tensor on the CPU
            return False
        # float32 leaves 1e-6 between two ways to compute one formula; GELU and its form with tanh are 4e-4 apart
        return isinstance(values, Tensor) and torch.allclose(values, function(grid), rtol=0, atol=1e-5)
