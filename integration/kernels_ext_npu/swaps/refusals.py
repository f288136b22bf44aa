"""Reasons why no kernel is swapped in, which several kinds of kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

from kernels_ext_npu.binding import loaded_kernels, registration
from kernels_ext_npu.binding.devices import compute_device, is_elsewhere
from kernels_ext_npu.reasons import Reason

if TYPE_CHECKING:
    from kernels_ext_npu.recognition.computed import NotRecognised

NOT_REGISTERED = Reason(
    "not registered", "kernels are not registered: call kernels_ext_npu.register() before the model is loaded"
)
NOT_ASKED_FOR = Reason(
    "not asked for",
    "the model was loaded without use_kernels=True, or its kernels were taken out: call kernelize(model)",
)
NOT_ASKED_FOR_BY_ANY = Reason(
    "not asked for",
    "no model of the architecture was loaded with use_kernels=True, or restore() was called: kernelize(model)",
)
NO_RMS_NORM = Reason("unknown", "not an RMS norm")
FORWARD_UNKNOWN = Reason("unknown", "no kernel computes what its forward computes")
FUNCTION_UNKNOWN = Reason("unknown", "no kernel computes what it computes")
METHOD = Reason("unknown", "it is a method that reads more of its module than settings")
RESTORED = Reason(
    "restored", "restore() was called for this part of the model: kernelize() swaps kernels into it again"
)
OTHER_SETTINGS = Reason("settings", "its settings are others now")
AT_FIRST_CALL = Reason("at first call", "swapped in when the model is first called on the NPU")


def unknown_function(seen: str | None) -> Reason:
    """Say of a function or method that no kernel computes it, and what it was seen to do that is in no rotation."""
    return Reason("unknown", f"{FUNCTION_UNKNOWN}: {seen}") if seen else FUNCTION_UNKNOWN


def unknown_forward(what: NotRecognised | None) -> Reason:
    """Say of a module that no kernel computes its forward, and what that was seen to do, if it was run."""
    if what is None:
        return FORWARD_UNKNOWN
    if what.calls_operator:
        return Reason("own operator", f"its forward calls {what.seen} itself")
    return Reason("unknown", f"{FORWARD_UNKNOWN}: {what.seen}")


def left_calls(shapes: str) -> Reason:
    """Say of a rotary function or module of which shapes it was called and computed itself."""
    return Reason("other shapes", f"but it computes calls of {shapes} itself: it is not known to rotate these")


def not_swapped() -> Reason:
    """Say of what a kernel fits that nobody has asked for it."""
    return NOT_REGISTERED if registration.current is None else NOT_ASKED_FOR


def changed(module: nn.Module, reason: str, is_model_elsewhere: bool) -> Reason:
    """Say of a kernel that is in place that it no longer fits, until kernels are looked at again.

    A module without tensors is where the model around it is.
    """
    is_away = is_elsewhere(module) or (is_model_elsewhere and compute_device(module) is None)
    advice = "restore(model) takes the kernels out" if is_away else "kernelize(model) takes the kernel out"
    return Reason("changed", f"changed since it was swapped in: {reason}; {advice}")


def left_out(repository: str) -> Reason | None:
    """Return why nothing is served by a kernel that register() was not to use; None where it is used, or nothing is."""
    if registration.current is None or repository in registration.current.kernels:
        return None
    return Reason("left out", f"register(kernels={sorted(registration.current.kernels)}) leaves {repository} out")


def unwanted(module: nn.Module, repository: str) -> Reason | None:
    """Return why somebody does not want a kernel of a repository for a module; None if nobody said so."""
    return RESTORED if module in registration.restored else left_out(repository)


def elsewhere(module: nn.Module) -> Reason | None:
    """Say of a module on another device where it is, and what to do; None where it is on the NPU."""
    where = compute_device(module)
    if where in ("npu", None):
        return None
    return Reason(
        "elsewhere", f"it is on {where}: load with device_map='npu', or move the model and call kernelize(model)"
    )


def served_by(forward: Callable) -> Reason:
    """Say of a stranger's kernel which it is."""
    kernel = loaded_kernels.kernel_name(forward)
    return Reason("served", f"served by {loaded_kernels.class_name(forward)} of the kernel {kernel}, which is not ours")


def by_torch(function: str | None) -> Reason:
    """Say of a module that the kernel computes a function of torch which it calls."""
    return Reason("torch", f"where it calls torch's {function}, which is the kernel's until unregister()")


def bypassed_by(foreign: str) -> Reason:
    """Say of what was swapped that another library's forward around it may compute without it."""
    return Reason("passed by", f"but another library replaced the forward around it, and may not call it: {foreign}")
