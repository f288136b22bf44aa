"""Two linear layers of one input as one matrix product, without a second copy of their weights.

``pack`` lays the weights of both into neighbouring memory, that of the gate first. Each has a storage of its own there
and stays the parameter of its own module: optimisers, state dicts, gradients, savers and whoever resizes or frees a
storage see what they saw before. ``project`` multiplies with both at once, as long as they still are neighbours.

What is asked in every forward is asked of the dictionaries of a module: an attribute that is a parameter or a module
takes a call of Python to find.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules import linear
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from ._common.adjacent_storage import are_neighbours
from .activations import meet
from .memory import immovable, neighbours_in
from .projecting import project

__all__ = ["meet", "obstacle", "pack", "project", "projections", "separate"]

THREE_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up, down
OF_MLPS = (*THREE_PROJECTIONS, ("wi_0", "wi_1", "wo"))
# gate and up in one, down
# torch's own: somebody may have put something in their places, before or since
_CALL = nn.Module._wrapped_call_impl
_FORWARD = nn.Linear.forward if getattr(nn.Linear.forward, "__globals__", None) is vars(linear) else None
TWO_PROJECTIONS = (
    ("gate_up_proj", "down_proj"),
    ("input_linear", "output_linear"),
    ("Wi", "Wo"),
    ("fc1", "fc2"),
)


def projections(mlp: nn.Module, names: tuple[tuple[str, ...], ...] = OF_MLPS) -> tuple[nn.Module, ...]:
    """Return the projections of an MLP by what they are for, whatever names it gives them.

    Args:
        mlp: has its projections as members.
        names: the names that they may have, in the order in which they are returned.

    Returns:
        Those of gate, up and down, or with ``names=TWO_PROJECTIONS`` the one of gate and up together, and that of down.

    Raises:
        AttributeError: it has none of them.
    """
    modules = mlp._modules
    for group in names:
        if group[0] in modules:
            return tuple([modules[name] for name in group])  # type: ignore[misc]
    expected = " or ".join(", ".join(group) for group in names)
    raise AttributeError(f"{type(mlp).__name__} has none of the projections that this layer reads: {expected}")


def pack(gate: nn.Module, up: nn.Module) -> str | None:
    """Lay the weights of two linear layers, and their biases, into neighbouring memory.

    It needs memory for both a second time while it runs. Parameters stay the same objects.

    Args:
        gate: a linear layer ``[H] -> [I]`` on the NPU.
        up: another one, whose weights go behind those of the gate.

    Returns:
        What :func:`obstacle` says; None if it is done. Packing what is packed changes nothing.
    """
    reason = obstacle(gate, up)
    if reason is None:
        for a, b in _apart(gate, up):
            with torch.inference_mode(a.is_inference()):  # what is made in inference mode cannot be trained
                both = torch.empty((2 * a.shape[0], *a.shape[1:]), dtype=a.dtype, device=a.device)
                for parameter, place in zip((a, b), neighbours_in(both), strict=True):
                    place.copy_(parameter.detach())
                    parameter.data = place
    return reason


def obstacle(gate: nn.Module, up: nn.Module) -> str | None:
    """Say why two layers cannot be packed, in a clause; None if they can, or are.

    A weight that somebody else also holds, such as a state dict, stays where it is: what holds it would not follow.

    Args:
        gate: a module, of whatever class.
        up: another one.
    """
    reason = _unfit_pair(gate, up)
    if reason is not None:
        return reason
    reasons = (immovable(parameter) for pair in _apart(gate, up) for parameter in pair)
    return next(filter(None, reasons), None)


def separate(gate: nn.Module, up: nn.Module) -> str | None:
    """Say why two layers are multiplied one after the other; None if they are packed.

    Args:
        gate: a module, of whatever class.
        up: another one.
    """
    reason = _unfit_pair(gate, up)
    if reason is not None:
        return reason
    for a, b in _pairs(gate, up):
        if not are_neighbours(a, b):
            return "the weights do not lie side by side"
    return None


def unfit(module: nn.Module) -> str | None:
    """Say why a projection has to be called; None if it is a product with its weight and nothing else.

    It looks at the host's objects only, never at what is on the device.
    """
    if type(module) is not nn.Linear:
        return f"a projection is a {type(module).__module__}.{type(module).__name__}"
    if nn.Linear.forward is not _FORWARD or nn.Linear.__call__ is not _CALL:
        return "the forward of all linear layers was replaced"
    members = vars(module)
    if (
        "forward" in members
        or members["_forward_hooks"]
        or members["_forward_pre_hooks"]
        or members["_backward_hooks"]
        or members["_backward_pre_hooks"]
        or _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    ):
        return "a projection has hooks, which one product would pass by"
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        kind = type(parameter)
        if kind is not nn.Parameter and kind is not FakeTensor:
            return f"a weight is a {kind.__name__}"
        if parameter.is_meta:
            return "a weight is offloaded"
    if "weight" not in module._parameters or "bias" not in module._parameters:
        return "a weight is no parameter"
    return None


def _unfit_pair(gate: nn.Module, up: nn.Module) -> str | None:
    """Say why two modules can never be one product, wherever their weights lie; None if they can."""
    reason = unfit(gate) or unfit(up)
    if reason is not None:
        return reason
    if (gate._parameters["bias"] is None) != (up._parameters["bias"] is None):
        return "only one projection has a bias"
    for a, b in _pairs(gate, up):
        device = a.device
        if a.shape != b.shape or a.dtype != b.dtype or device != b.device:
            return "the projections differ in size, dtype or device"
        if device.type != "npu":
            return "the weights are not on the NPU"
    return None


def _apart(gate: nn.Module, up: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs that are no neighbours."""
    return [(a, b) for a, b in _pairs(gate, up) if not are_neighbours(a, b)]


def _pairs(gate: nn.Module, up: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Pair the weights of two layers, and their biases if they have any."""
    a, b = gate._parameters, up._parameters
    weights = (a["weight"], b["weight"])
    return [weights] if a["bias"] is None else [weights, (a["bias"], b["bias"])]
