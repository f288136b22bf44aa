"""Nodes of autograd for logits that are not computed, so that whoever asks for their gradient gets an ordinary one.

Logits are computed if the user still holds them when the backward begins, which is seen by weak references. A node that
needs their values therefore saves a twin, a second lazy tensor, and never keeps the user's own tensor alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels_ext_npu.swaps.loss.steps import Step

HELD = "the output was still held when the backward began"
_calls: weakref.WeakSet[Call] = weakref.WeakSet()  # calls whose logits may not be computed yet


class Call:
    """A call of a head."""

    def __init__(self) -> None:
        # its output and all that was derived from it, in the order in which they were made; some may be gone
        self.logits: list[weakref.ref[Any]] = []
        self.is_asked_for = False  # whether the gradient of any of them was asked for
        self.reason: str | None = None  # why they were computed; None if they were not
        _calls.add(self)

    def materialize(self, reason: str) -> None:
        """Compute all logits that are still held: later ones may be changed in place."""
        for reference in self.logits:
            if (logits := reference()) is not None and logits.known is None:
                self.reason = reason
                logits.compute()

    @staticmethod
    def materialize_all() -> None:
        """Compute the logits that are still held, of all calls: after a backward weights change."""
        for call in list(_calls):
            _calls.discard(call)
            call.materialize(HELD)


class Head(torch.autograd.Function):
    """The node of what a head returns: ``apply(hidden_states, weight, bias, call, make)`` returns ``make()``."""

    @staticmethod
    def forward(ctx, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, call: Call, make: Callable) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_states, weight)
        ctx.call = call
        return make()

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.materialize_all()
        if grad is None:
            return None, None, None, None, None
        hidden_states, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        d_hidden = grad @ weight if needs_hidden else None
        d_weight = rows.t() @ hidden_states.reshape(-1, hidden_states.shape[-1]) if needs_weight else None
        return d_hidden, d_weight, rows.sum(0) if needs_bias else None, None, None


class Follow(torch.autograd.Function):
    """The node of what a step makes of logits: ``apply(logits, step, make, twin)`` returns ``make()``.

    The twin has the values that the gradient depends on; it is None where that depends on none.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, step: Step, make: Callable, twin: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(twin)
        ctx.step, ctx.shape, ctx.dtype = step, logits.shape, logits.dtype
        return make()

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        if (found := ctx.step.adjoint(grad, ctx.shape, ctx.dtype)) is None:
            (twin,) = ctx.saved_tensors
            if twin is None:
                twin = grad.new_zeros((), dtype=ctx.dtype).expand(ctx.shape).requires_grad_()
            found = _gradient(ctx.step, twin, grad)
        return found, None, None, None


class PassBy(torch.autograd.Function):
    """The node that routes the gradient of a loss past logits that were never computed, unless somebody wants theirs.

    ``apply(loss, twin, function, call)`` returns the loss itself. Its backward passes the gradient to the kernel that
    computed the loss; where the gradient of the logits was asked for, it goes through ``function(twin)`` instead, which
    is the loss computed from logits.
    """

    @staticmethod
    def forward(ctx, loss: Tensor, twin: Tensor, function: Callable, call: Call) -> Tensor:
        ctx.mark_dirty(loss)  # neither a copy nor a view: a Trainer multiplies it in place
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(twin)
        ctx.function, ctx.call = function, call
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        call.materialize_all()
        # `backward(inputs=...)` sets `retains_grad`
        is_asked_for = call.is_asked_for or any(getattr(logits(), "retains_grad", False) for logits in call.logits)
        if grad is None or not is_asked_for:
            return grad, None, None, None
        (twin,) = ctx.saved_tensors
        return None, _gradient(ctx.function, twin, grad), None, None


def _gradient(function: Callable[[Tensor], Tensor], logits: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of logits, from that of what a function makes of them; it can be derived where it may be."""
    is_derived = torch.is_grad_enabled()
    if hasattr(logits, "compute"):
        logits.compute()
    with torch.enable_grad():
        result = function(logits)
    return torch.autograd.grad(result, logits, grad, create_graph=is_derived)[0]
