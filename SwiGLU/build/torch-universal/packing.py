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

from ._common.adjacent_storage import are_neighbours
from ._common.modules import CALL, has_hooks
from .activations import meet
from .memory import adjacent_halves, immovable
from .packed_projection import project

__all__ = ["meet", "obstacle", "pack", "project", "projections", "separate"]

# gate, up, down
MLP_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
# gate and up in one, down
TWO_PROJECTIONS = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"), ("Wi", "Wo"), ("fc1", "fc2"))
# torch's own: somebody may have put something in their places, before or since
_FORWARD = nn.Linear.forward if getattr(nn.Linear.forward, "__globals__", None) is vars(linear) else None


def projections(mlp: nn.Module, names: tuple[tuple[str, ...], ...] = MLP_PROJECTIONS) -> tuple[nn.Module, ...]:
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
    pairs, reason = _movable_pairs(gate, up)
    for a, b in pairs:
        with torch.inference_mode(a.is_inference()):  # what is made in inference mode cannot be trained
            both = torch.empty((2 * a.shape[0], *a.shape[1:]), dtype=a.dtype, device=a.device)
            for parameter, place in zip((a, b), adjacent_halves(both), strict=True):
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
    return _movable_pairs(gate, up)[1]


def separate(gate: nn.Module, up: nn.Module) -> str | None:
    """Say why two layers are multiplied one after the other; None if they are packed.

    Args:
        gate: a module, of whatever class.
        up: another one.
    """
    pairs, reason = _pairs(gate, up)
    for a, b in pairs:
        if not are_neighbours(a, b):
            return "the weights do not lie side by side"
    return reason


def unfit(module: nn.Module) -> str | None:
    """Say why a projection has to be called; None if it is a product with its weight and nothing else.

    It looks at the host's objects only, never at what is on the device.
    """
    if type(module) is not nn.Linear:
        return f"a projection is a {type(module).__module__}.{type(module).__name__}"
    if nn.Linear.forward is not _FORWARD or nn.Linear.__call__ is not CALL:
        return "the forward of all linear layers was replaced"
    if "forward" in module.__dict__ or has_hooks(module):
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


def _movable_pairs(gate: nn.Module, up: nn.Module) -> tuple[list[tuple[Tensor, Tensor]], str | None]:
    """Return the pairs of :func:`_pairs` that are no neighbours; none and why where one has to stay where it is."""
    pairs, reason = _pairs(gate, up)
    apart = [pair for pair in pairs if not are_neighbours(*pair)]
    reasons = (immovable(parameter) for pair in apart for parameter in pair)
    reason = reason or next(filter(None, reasons), None)
    return ([], reason) if reason else (apart, None)


def _pairs(gate: nn.Module, up: nn.Module) -> tuple[list[tuple[Tensor, Tensor]], str | None]:
    """Pair the weights of two layers, and their biases if they have any.

    None are returned, and the reason, where they can never be one product, wherever their weights lie.
    """
    reason = unfit(gate) or unfit(up)
    if reason is not None:
        return [], reason
    a, b = gate._parameters, up._parameters
    weights, biases = (a["weight"], b["weight"]), (a["bias"], b["bias"])
    if (biases[0] is None) != (biases[1] is None):
        return [], "only one projection has a bias"
    pairs = [weights] if biases[0] is None else [weights, biases]
    for first, second in pairs:
        device = first.device
        if first.shape != second.shape or first.dtype != second.dtype or device != second.device:
            return [], "the projections differ in size, dtype or device"
        if device.type != "npu":
            return [], "the weights are not on the NPU"
    return pairs, None
