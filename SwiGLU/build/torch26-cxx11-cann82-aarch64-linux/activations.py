"""Whether the activation that an MLP has now is the one that its kernel computes, which passes it by.

It is asked in every forward, of the class of the activation, of the formula of torch's GELU and of a forward that the
class or the object alone was given: that takes no call. The values of each are looked at once. Any other attribute that
changes what an object computes is not seen here, but when the model is kernelized.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)
from torch.utils._python_dispatch import _disable_current_modes

from .operators import EXACT_GEGLU, GEGLU, SWIGLU, GatedUnit

_CALL = nn.Module._wrapped_call_impl
_NAMES = ("act_fn", "activation_fn", "activation", "act")  # what transformers calls it


def passed_over(mlp: nn.Module, unit: GatedUnit) -> Callable[[Tensor], Tensor] | None:
    """Return the activation of an MLP if it has to be called: it computes something else, or somebody watches it.

    Args:
        mlp: has its activation as a member, or none where its forward names a function.
        unit: what is computed otherwise.
    """
    modules = mlp._modules
    for name in _NAMES:
        if name in modules:
            break
    else:
        return _function_of(mlp)
    activation, kinds = modules[name], unit.activations
    members, kind = activation.__dict__, type(activation)
    forward = kind.forward
    own = members["forward"] if "forward" in members else None  # noqa: SIM401  get() would be a call
    if own is not None and (type(own) is not MethodType or own.__func__ is not forward):
        kind = forward = own.__func__ if type(own) is MethodType else own
    elif kind is nn.GELU:
        kind = members["approximate"]
    if kind not in kinds and not torch.compiler.is_compiling():  # then one that was not met before is called
        kinds[kind] = forward if _has_values_of(unit, activation) else None
    if (
        kind not in kinds
        or kinds[kind] is not forward
        or type(activation).__call__ is not _CALL
        or members["_forward_hooks"]
        or members["_forward_pre_hooks"]
        or members["_backward_hooks"]
        or members["_backward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return activation
    return None


def is_met(mlp: nn.Module, unit: GatedUnit) -> bool:
    """Tell whether the activation of an MLP is known to be that of a unit."""
    modules = mlp._modules
    for name in _NAMES:
        if name in modules:
            activation = modules[name]
            kind = activation.__dict__["approximate"] if type(activation) is nn.GELU else type(activation)
            return unit.activations.get(kind) is not None
    return unit is SWIGLU


def meet(mlp: nn.Module) -> None:
    """Look at the values of an MLP's activation, so that a graph may be captured from its first call on."""
    for unit in (SWIGLU, GEGLU, EXACT_GEGLU):
        passed_over(mlp, unit)


def _function_of(mlp: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return the activation of an MLP that somebody has made a function; None if there is none."""
    members = mlp.__dict__
    return next((members[name] for name in _NAMES if name in members), None)


def _has_values_of(unit: GatedUnit, activation: nn.Module) -> bool:
    """Compare an activation with that of a unit, on the host. One with parameters of its own is another function."""
    if any(True for _ in (*activation.parameters(), *activation.buffers())):
        return False
    with _disable_current_modes(), torch.no_grad():  # with fake tensors there would be no values
        grid = torch.linspace(-9, 9, 181, device="cpu")
        try:
            values = activation.forward(grid.clone())  # not its hooks
        except Exception:  # it wants something else than one tensor on the CPU
            return False
        # float32 leaves 1e-6 between two ways to compute tanh; GELU and its form with tanh are 4e-4 apart
        return isinstance(values, Tensor) and torch.allclose(values, unit.activation(grid), rtol=0, atol=1e-5)
