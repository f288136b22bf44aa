"""Derivatives of gradients: computed in torch, or refused, and never left out.

A forward that launches its operator bare is differentiated by torch_npu. Asked for a second derivative, torch warns of
the operator that computed the first one, and goes on without it. What is registered here says what that operator
computes in operators of torch; it runs only where the first derivative was made to be differentiated again.

torch's ``once_differentiable`` raises in ``backward()`` only: ``torch.autograd.grad`` goes on without such a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.library import Library

from .derivatives import by_formula

_KEY = "AutogradPrivateUse1"
_registered: list[Library] = []  # a registration lives as long as its library


def let_differentiate(
    operator: OpOverload, place: int, in_torch: Callable[..., Tensor | tuple[Tensor | None, ...] | str]
) -> None:
    """Let an operator of torch_npu be differentiated, unless torch_npu or another copy of this kernel does so already.

    Args:
        operator: computes gradients, and has no derivative.
        place: of its arguments, that of the gradient that it gets. Where nothing depends on what the forward gave there
            is none, and none are returned.
        in_torch: takes its arguments, and computes the same by operators of torch; or returns why it does not, for who
            differentiates what the operator computed.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), _KEY):
        return
    below = torch._C._after_autograd_keyset
    returns = len(operator._schema.returns)

    def compute(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor | None, ...] | None:
        if args[place] is None:  # torch_npu's node launches it all the same
            return None if returns == 1 else (None,) * returns
        if not torch.is_grad_enabled():
            return operator.redispatch(keys & below, *args, **kwargs)
        inputs = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not any(tensor.requires_grad for tensor in inputs):
            return operator.redispatch(keys & below, *args, **kwargs)
        found = in_torch(*args, **kwargs)
        if not isinstance(found, str):
            return found
        return _Refused.apply(found, operator.redispatch(keys & below, *args, **kwargs), *inputs)

    library = Library(operator.namespace, "IMPL")
    library.impl(operator._opname, compute, _KEY, with_keyset=True)
    _registered.append(library)


def differentiable_once(backward: Callable[..., tuple[Tensor | None, ...]]) -> Callable[..., tuple[Tensor | None, ...]]:
    """Let the backward of a node of autograd raise where what it returns is differentiated again, or is of several.

    ``torch.autograd.grad(is_grads_batched=True)`` asks for several gradients at once.

    Args:
        backward: takes the node, what it saved, which may be looked at once, and gradients.
    """

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        with torch.no_grad():
            if by_formula(*grads):
                raise NotImplementedError(
                    f"{type(ctx).__name__} goes backward for one gradient at a time: call torch.autograd.grad for each "
                    "without is_grads_batched, or the module's original forward, which takes several"
                )
            found = backward(ctx, saved, *grads)
        if not torch.is_grad_enabled():
            return found
        node = type(ctx).__name__.removesuffix("Backward").lstrip("_")
        why = (
            f"a gradient of the kernel {node} has no derivative; the original forward has one: "
            "kernels_ext_npu.restore(module) gives it back"
        )
        return _Refused.apply(why, found, *saved, *grads)

    return refusing


class _Refused(torch.autograd.Function):
    """Returns what was computed of inputs, and says why there is no derivative when it is asked for one."""

    @staticmethod
    def forward(ctx: Any, why: str, results: tuple[Tensor | None, ...], *_: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.why = why
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError(ctx.why)
