"""Whether the activation that an MLP has now is the one that its kernel computes, so that it need not be called.

It is asked in every forward, of the class of the activation, of the formula of torch's GELU and of a forward that the
class or the object alone was given: that takes no call. The values of each are looked at once. Any other attribute that
changes what an object computes is not seen here, but when the model is kernelized.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import torch
from torch import Tensor, nn

from ._common.modules import has_hooks, has_values
from .operators import EXACT_GEGLU, GEGLU, SWIGLU, GatedUnit

_NAMES = ("act_fn", "activation_fn", "activation", "act")  # what transformers calls it


def activation_to_call(mlp: nn.Module, unit: GatedUnit) -> Callable[[Tensor], Tensor] | None:
    """Return the activation of an MLP if it has to be called: it computes something else, or has hooks.

    Args:
        mlp: has its activation as a member, or none where its forward names a function.
        unit: what is computed otherwise; SwiGLU where there is no activation.
    """
    modules = mlp._modules
    for name in _NAMES:
        if name in modules:
            break
    else:  # somebody may have made it a function
        members = mlp.__dict__
        return next((members[name] for name in _NAMES if name in members), None)
    activation, recognised = modules[name], unit.recognised
    members, key = activation.__dict__, type(activation)
    forward = key.forward
    own = members["forward"] if "forward" in members else None  # noqa: SIM401  get() would be a call
    if own is not None and (type(own) is not MethodType or own.__func__ is not forward):
        key = own.__func__ if type(own) is MethodType else own  # which may hand over to that of the class
    elif key is nn.GELU:
        key = members["approximate"]
    if key not in recognised and not torch.compiler.is_compiling():  # in a graph one that is not known yet is called
        recognised[key] = forward if has_values(activation, unit.activation) else None
    is_computed = key in recognised and recognised[key] is forward and not has_hooks(activation)
    return None if is_computed else activation


def meet(mlp: nn.Module) -> None:
    """Look at the values of an MLP's activation, so that a graph may be captured from its first call on."""
    for unit in (SWIGLU, GEGLU, EXACT_GEGLU):
        activation_to_call(mlp, unit)
