"""Two linear layers of one input as one matrix product, without a second copy of their weights.

``pack`` moves the weights of both into one storage ``[2·I, H]``, the first half of which is the gate's weight and the
second half the other's. Both stay parameters of their own modules; optimisers, state dicts and gradients see what they
saw before. ``project`` multiplies with the whole storage, as long as the two still lie side by side.

What is asked in every forward is asked of the dictionaries of a module: an attribute that is a parameter or a module
takes a call of Python to find.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from .neighbours import are_neighbours, as_one

THREE_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))  # gate, up, down
TWO_PROJECTIONS = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))  # gate and up in one, down


def projections(mlp: nn.Module, names: tuple[tuple[str, ...], ...] = THREE_PROJECTIONS) -> tuple[nn.Module, ...]:
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


def project(gate: nn.Module, up: nn.Module, x: Tensor) -> Tensor:
    """Multiply with the weights of two packed layers at once, and add their biases. Differentiable.

    Args:
        gate: a linear layer ``[H] -> [I]``.
        up: another one. Of both :func:`separate` has to say None, which is not looked at here.
        x: ``[..., H]``, of the dtype of the weights.

    Returns:
        ``[..., 2·I]``, the gate first.
    """
    a, b = gate._parameters, up._parameters
    bias = None if a["bias"] is None else _packed(a["bias"], b["bias"])
    return F.linear(x, _packed(a["weight"], b["weight"]), bias)


def pack(gate: nn.Module, up: nn.Module) -> str | None:
    """Let the weights of two linear layers, and their biases, share one storage.

    Args:
        gate: a linear layer ``[H] -> [I]``.
        up: another one, whose weights go behind those of the gate.

    Returns:
        A clause that says why that cannot be, None if it is done. Packing what is packed changes nothing.
    """
    reason = _unfit_pair(gate, up)
    if reason is not None:
        return reason
    for a, b in _pairs(gate, up):
        if not are_neighbours(a, b):
            for parameter in (a, b):
                if not parameter.numel():
                    return "a weight is empty here"
                if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size():
                    return "a weight is part of a larger storage"
    for a, b in _pairs(gate, up):
        if not are_neighbours(a, b):
            with torch.inference_mode(a.is_inference()):  # what is made in inference mode cannot be trained
                both = torch.empty((2 * a.shape[0], *a.shape[1:]), dtype=a.dtype, device=a.device)
                for parameter, place in zip((a, b), both.chunk(2)):
                    place.copy_(parameter.detach())
                    parameter.data = place
    return None


def unpack(gate: nn.Module, up: nn.Module) -> None:
    """Give the weights of two linear layers storages of their own again, where nothing but the two is in one.

    Neighbours in somebody else's buffer, such as that of an optimizer, stay there.

    Args:
        gate: a linear layer, packed or not.
        up: the other one.
    """
    for a, b in _pairs(gate, up):
        sizes = [parameter.numel() * parameter.element_size() for parameter in (a, b)]
        if are_neighbours(a, b) and a.untyped_storage().nbytes() == sum(sizes):
            for parameter in (a, b):
                with torch.inference_mode(parameter.is_inference()):
                    parameter.data = parameter.detach().clone()


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
            return "the weights do not lie side by side in one storage"
    return None


def unfit(module: nn.Module) -> str | None:
    """Say why a projection has to be called; None if it is a product with its weight and nothing else.

    It looks at the host's objects only, never at what is on the device.
    """
    if type(module) is not nn.Linear:
        return f"a projection is a {type(module).__module__}.{type(module).__name__}"
    members = vars(module)
    if (
        "forward" in members
        or members["_forward_hooks"]
        or members["_forward_pre_hooks"]
        or members["_backward_hooks"]
        or members["_backward_pre_hooks"]
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
        if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
            return "the projections differ in size, dtype or device"
    return None


def _pairs(gate: nn.Module, up: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Pair the weights of two layers, and their biases if they have any."""
    a, b = gate._parameters, up._parameters
    weights = (a["weight"], b["weight"])
    return [weights] if a["bias"] is None else [weights, (a["bias"], b["bias"])]


def _packed(a: Tensor, b: Tensor) -> Tensor:
    """View two neighbours as one, with a gradient for each where one is asked for."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Packed.apply(a, b)
    return as_one(a, b)


class _Packed(torch.autograd.Function):
    """Views two neighbours as one. The gradient is one tensor too, of which each of them gets a view."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        return as_one(a, b)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad.chunk(2)
