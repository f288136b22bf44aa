"""Why no kernel is in a module's place, or in a function's: each sentence is written here once.

What only one mechanism knows, such as how weights lie, is said there: packing.py, experts.py, forwards.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType, MethodType

from torch import nn

from kernels_ext_npu.matching.lookup import find_reference
from kernels_ext_npu.references import Reference
from kernels_ext_npu.swapping import forwards, loaded, state
from kernels_ext_npu.swapping.devices import device_of, is_elsewhere
from kernels_ext_npu.swapping.experts.implementation import other_than_ours
from kernels_ext_npu.swapping.experts.serving import is_experts

CHANGED = "changed since it was swapped in"
NOT_REGISTERED = "kernels are not registered: call kernels_ext_npu.register() before the model is loaded"
NOT_ASKED_FOR = "the model was loaded without use_kernels=True, or its kernels were taken out: call kernelize(model)"
NOT_ASKED_FOR_BY_ANY = (
    "no model of the architecture was loaded with use_kernels=True, or restore() was called: kernelize(model)"
)
NO_RMS_NORM = "not an RMS norm"
FORWARD_UNKNOWN = "no kernel computes what its forward computes"
FUNCTION_UNKNOWN = "no kernel computes what it computes"
RESTORED = "restore() was called for this part of the model: kernelize() swaps kernels into it again"
AT_FIRST_CALL = "swapped in when the model is first called on the NPU"


def refusal(module: nn.Module) -> str | None:
    """Return why no kernel can take the place of a module's forward; None if one can."""
    reference = find_reference(type(module))
    if reference is None:
        stranger = replaced(module)
        return FORWARD_UNKNOWN if stranger is None else f"another library replaced its forward: {stranger}"
    if is_elsewhere(module):
        return elsewhere(module)
    return forwards.refuse_wrapper(module) or of_instance(module, reference)


def of_instance(module: nn.Module, reference: Reference) -> str | None:
    """Return why the kernel for what a class computes is not for this instance, wherever it is; None if it is."""
    return not_wanted(module, reference) or reference.refuse(module)


def not_wanted(module: nn.Module, reference: Reference) -> str | None:
    """Return why somebody does not want the kernel for an instance; None if nobody said so."""
    if module in state.restored:
        return RESTORED
    return left_out(reference.repository) or _other_experts(module)


def changed(module: nn.Module, reason: str) -> str:
    """Say of a kernel that is in place that it no longer fits, until kernels are looked at again."""
    advice = "restore(model) takes the kernels out" if is_elsewhere(module) else "kernelize(model) takes the kernel out"
    return f"{CHANGED}: {reason}; {advice}"


def left_out(repository: str) -> str | None:
    """Return why nothing is served by a kernel that register() was not to use; None where it is used, or nothing is."""
    if state.current is None or repository in state.current.kernels:
        return None
    return f"register(kernels={sorted(state.current.kernels)}) leaves {repository} out"


def elsewhere(module: nn.Module) -> str:
    """Say of a module on another device where it is, and what to do."""
    return f"it is on {device_of(module)}: load with device_map='npu', or move the model and call kernelize(model)"


def served_by(forward: Callable) -> str:
    """Say of a stranger's kernel which it is."""
    return f"served by {loaded.class_name(forward)} of the kernel {loaded.kernel_name(forward)}, which is not ours"


def passed_by(stranger: str) -> str:
    """Say of what was swapped that another library's forward around it may compute without it."""
    return f"but another library replaced the forward around it, and may not call it: {stranger}"


def replaced(module: nn.Module) -> str | None:
    """Return the name of a forward that another library gave a module, or its class, in place of its own."""
    bound = vars(module).get("forward")
    own = forwards.own_forward(module)
    forward = own or (bound.__func__ if isinstance(bound, MethodType) else type(module).forward)
    if not isinstance(forward, FunctionType) or loaded.kernel_name(forward) is not None:
        return None
    return foreign(forward, *(base.__module__ for base in type(module).__mro__))


def decorates_own(module: nn.Module) -> bool:
    """Tell whether the forward of an instance names that of its class as what it wraps, as accelerate's in autocast."""
    bound, own = vars(module).get("forward"), type(module).forward
    return bound is not None and inspect.unwrap(bound, stop=lambda function: function is own) is own


def foreign(function: FunctionType, *modules: str) -> str | None:
    """Return the full name of a function from another library than all these modules; None if it is from one."""
    libraries = {module.partition(".")[0] for module in modules}
    if function.__module__.partition(".")[0] in libraries:
        return None
    return f"{function.__module__}.{function.__qualname__}"


def _other_experts(module: nn.Module) -> str | None:
    asked_for = other_than_ours(module.config) if is_experts(module) else None
    return None if asked_for is None else f"the experts implementation {asked_for} was asked for"
