"""Two linear layers of one input as one matrix product, without a second copy of their weights.

``pack`` moves the weights of both into one storage ``[2·I, H]``, the first half of which is the gate's weight and the
second half the other's. Both stay parameters of their own modules; optimisers, state dicts and gradients see what they
saw before. ``project`` multiplies with the whole storage, as long as the two still lie side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def project(gate: nn.Module, up: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Both products of ``x``.

    Args:
        gate: a linear layer ``[H] -> [I]``.
        up: the same.
        x: ``[..., H]``.

    Returns:
        ``[..., 2·I]`` and None where the layers are packed, otherwise ``[..., I]`` of each.
    """
    if torch.compiler.is_compiling() or separate(gate, up) is not None:
        return gate(x), up(x)
    bias = None if gate.bias is None else _join(gate.bias, up.bias)
    return F.linear(x, _join(gate.weight, up.weight), bias), None


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
    if not all(_adjacent(a, b) for a, b in _pairs(gate, up)):
        return "the weights do not lie side by side in one storage"
    return None


def unfit(module: nn.Module) -> str | None:
    """Why a projection has to be called; None if it is a product with its weight and nothing else.

    Looks at the host's objects only, never at what is on the device.
    """
    if type(module) is not nn.Linear:
        return f"a projection is a {type(module).__module__}.{type(module).__name__}"
    if "forward" in vars(module) or any(vars(module).get(hooks) for hooks in _HOOKS):
        return "a projection has hooks, which one product would pass by"
    for parameter in module.parameters(recurse=False):
        if type(parameter) not in (nn.Parameter, FakeTensor):
            return f"a weight is a {type(parameter).__name__}"
        if parameter.is_meta:
            return "a weight is offloaded"
    return None


def _unfit_pair(gate: nn.Module, up: nn.Module) -> str | None:
    for module in (gate, up):
        if (reason := unfit(module)) is not None:
            return reason
    if (gate.bias is None) != (up.bias is None):
        return "only one projection has a bias"
    for a, b in _pairs(gate, up):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            return "the projections differ in size, dtype or device"
    return None


def _pairs(gate: nn.Linear, up: nn.Linear) -> list[tuple[Tensor, Tensor]]:
    pairs = [(gate.weight, up.weight)]
    if gate.bias is not None:
        pairs.append((gate.bias, up.bias))
    return pairs


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


class _Join(torch.autograd.Function):
    """A view of two neighbours. Its gradient is one tensor, of which each of them gets a view."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        return both(a, b)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad.chunk(2)
