"""Which layer serves a module, and why none does."""

from __future__ import annotations

from torch import nn

from kernels_ext_npu.binding import forward_binding
from kernels_ext_npu.matching.lookup import why_not_served
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.experts.implementation import other_than_ours
from kernels_ext_npu.swaps.experts.serving import LAYER as EXPERTS


def layer_for(module: nn.Module, reference: Pattern | None) -> str | None:
    """Return the layer that serves a module, whose forward is that of a pattern, on the NPU; None if none does."""
    return None if reference is None or refusal(module, reference) is not None else reference.layer_for(module)


def refusal(module: nn.Module, reference: Pattern | None) -> str | None:
    """Return why no kernel can take the place of a module's forward, which is that of a pattern; None if one can."""
    if reference is None:
        stranger = forward_binding.stranger(module)
        if stranger is not None:
            return Reason("replaced", f"another library replaced its forward: {stranger}")
        return refusals.FORWARD_UNKNOWN
    reason = refusals.elsewhere(module) or forward_binding.refuse_wrapper(module)
    return reason or unwanted(module, reference) or why_not_served(module, reference)


def unwanted(module: nn.Module, reference: Pattern) -> Reason | None:
    """Return why somebody does not want the kernel for an instance; None if nobody said so."""
    if (reason := refusals.unwanted(module, reference.repository)) is not None:
        return reason
    asked_for = other_than_ours(module.config) if EXPERTS in reference.layers else None
    return None if asked_for is None else Reason("named", f"the experts implementation {asked_for} was asked for")
