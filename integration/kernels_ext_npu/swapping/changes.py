"""Kernels that no longer fit, since what decided on them has changed: they are taken out at the next look.

Whoever changes the activation of an MLP, the gate of experts or the class of a module has what it was swapped in for
in its place, or the original formula, until ``kernelize()``, ``train()``, ``eval()`` or ``use_kernels = True`` look
again.
"""

from __future__ import annotations

from torch import nn

from kernels_ext_npu.matching.lookup import find_reference
from kernels_ext_npu.swapping import forwards, loaded, refusals
from kernels_ext_npu.swapping.experts import serving as experts


def since_swapped(module: nn.Module) -> str | None:
    """Return why the kernel of ours in a module's place no longer fits; None if it does, or there is none."""
    if experts.has_changed(module):
        return "its gate reads other values"
    layer = loaded.layer_name(forwards.kernel_forward(module))
    if layer is None:
        return None
    reference = find_reference(type(module))
    if reference is None:
        return refusals.FORWARD_UNKNOWN
    if reference.sees_changes:
        return refusals.not_wanted(module, reference)
    reason = refusals.of_instance(module, reference)
    if reason is None and reference.layer(module) != layer:
        return f"it is for {reference.layer(module)} now, and has {layer}"
    return reason


def take_out(model: nn.Module) -> None:
    """Put the original forward back wherever a kernel no longer fits, and let experts look at their gates again."""
    experts.look_again(model)
    for module in model.modules():
        if since_swapped(module) is not None:
            forwards.take_out(module)
