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


def project(gate: nn.Module, up: nn.Module, x: Tensor) -> Tensor:
    """Both products of ``x``, ``[..., 2·I]``, for layers of which :func:`separate` says nothing.

    Args:
        gate: a linear layer ``[H] -> [I]``.
        up: the same.
        x: ``[..., H]``.
    """
    a, b = gate._parameters, up._parameters
    bias = None if a["bias"] is None else _join(a["bias"], b["bias"])
    return F.linear(x, _join(a["weight"], b["weight"]), bias)


def pack(gate: nn.Module, up: nn.Module) -> str | None:
    """Let the weights of two linear layers, and their biases, share one storage.

    Returns:
        Why that cannot be, None if it is done.
    """
    reason = _unfit_pair(gate, up)
    if reason is not None:
        return reason
    for a, b in _pairs(gate, up):
        if not _adjacent(a, b):
            for parameter in (a, b):
                if not parameter.numel():
                    return "a weight is empty here"
                if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size():
                    return "a weight is part of a larger storage"
    for a, b in _pairs(gate, up):
        if not _adjacent(a, b):
            both = torch.empty((2 * a.shape[0], *a.shape[1:]), dtype=a.dtype, device=a.device)
            for parameter, place in zip((a, b), both.chunk(2)):
                place.copy_(parameter.detach())
                parameter.data = place
    return None


def unpack(gate: nn.Module, up: nn.Module) -> None:
    """Give the weights of two linear layers storages of their own again."""
    for module in (gate, up):
        for parameter in module.parameters(recurse=False):
            if parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size():
                parameter.data = parameter.detach().clone()


def separate(gate: nn.Module, up: nn.Module) -> str | None:
    """Why two layers are multiplied one after the other; None if they are packed."""
    reason = _unfit_pair(gate, up)
    if reason is not None:
        return reason
    for a, b in _pairs(gate, up):
        if not _adjacent(a, b):
            return "the weights do not lie side by side in one storage"
    return None


def unfit(module: nn.Module) -> str | None:
    """Why a projection has to be called; None if it is a product with its weight and nothing else.

    Looks at the host's objects only, never at what is on the device.
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
    a, b = gate._parameters, up._parameters
    weights = (a["weight"], b["weight"])
    return [weights] if a["bias"] is None else [weights, (a["bias"], b["bias"])]


def _adjacent(a: Tensor, b: Tensor) -> bool:
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() + a.numel() == b.storage_offset()
        and a.is_contiguous()
        and b.is_contiguous()
    )


def _join(a: Tensor, b: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return _Join.apply(a, b)
    return both(a, b)


def both(a: Tensor, b: Tensor) -> Tensor:
    """Two neighbours as one tensor."""
    return a.as_strided((a.shape[0] + b.shape[0], *a.shape[1:]), a.stride(), a.storage_offset())


def joined(a: Tensor, b: Tensor) -> Tensor:
    """What were neighbours in the forward, as one: a saved parameter is the parameter as it is now, wherever it is."""
    return both(a, b) if _adjacent(a, b) else torch.cat((a, b))


class _Join(torch.autograd.Function):
    """A view of two neighbours. Its gradient is one tensor, of which each of them gets a view."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        return both(a, b)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad.chunk(2)
