"""Nodes of autograd for logits that are not computed, so that whoever asks for their gradient gets an ordinary one.

No node holds the logits themselves: whether somebody still does is what decides that they are computed
(deferred_logits.py). A node that needs their values computes them from what the head multiplied, which it saves as any
other node would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_OF_ENGINES = "torch.distributed."  # FSDP's hooks gather weights when a gradient arrives, whatever it is


class Head(torch.autograd.Function):
    """The node of what a head returns.

    ``apply(hidden_states, weight, bias, call, empty)`` returns ``empty()``, a tensor without memory.
    """

    @staticmethod
    def forward(ctx, hidden_states: Tensor, weight: Tensor, bias: Tensor | None, call: Any, empty: Callable) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(hidden_states, weight)
        ctx.call = call
        return empty()

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.compute_all_held()
        if grad is None:
            return None, None, None, None, None
        hidden_states, weight = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ weight if needs_hidden else None,
            rows.t() @ hidden_states.reshape(-1, hidden_states.shape[-1]) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
            None,
            None,
        )


class Same(torch.autograd.Function):
    """The node of another tensor that is the same logits: ``apply(logits, make)`` returns ``make()``."""

    @staticmethod
    def forward(ctx, logits: Tensor, make: Callable[[], Tensor]) -> Tensor:
        ctx.set_materialize_grads(False)
        return make()

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, None]:
        return grad, None


class Follow(torch.autograd.Function):
    """The node of what a function makes of logits.

    ``apply(logits, function, empty, values, *factors)`` returns ``empty()``; ``values(*factors)`` computes the logits,
    and is None where the gradient does not depend on them.
    """

    @staticmethod
    def forward(
        ctx, logits: Tensor, function: Callable, empty: Callable, values: Callable | None, *factors: Any
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, *factors)
        ctx.function, ctx.values = function, values
        return empty()

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        found = None if grad is None else _gradient(ctx.function, ctx.values, *ctx.saved_tensors, grad=grad)
        return found, *[None] * (len(ctx.needs_input_grad) - 1)


class PassBy(torch.autograd.Function):
    """The node between a loss and the logits that it was computed without.

    ``apply(loss, logits, call, plain, values, *factors)`` returns the loss itself. The backward goes on to what
    computed it, or, when somebody asks for the gradient of the logits, to these, with the gradient of
    ``plain(values(*factors))``.
    """

    @staticmethod
    def forward(
        ctx, loss: Tensor, logits: Tensor, call: Any, plain: Callable, values: Callable, *factors: Any
    ) -> Tensor:
        ctx.mark_dirty(loss)  # neither a copy nor a view: a Trainer multiplies it in place
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, *factors)
        ctx.call, ctx.plain, ctx.values = call, plain, values
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.call.compute_all_held()
        rest = [None] * (len(ctx.needs_input_grad) - 2)
        if grad is None or not ctx.call.is_asked():
            return grad, None, *rest
        return None, _gradient(ctx.plain, ctx.values, *ctx.saved_tensors, grad=grad), *rest


def is_of_an_engine(hook: Any) -> bool:
    """Tell whether a hook of a tensor waits for the backward alone, and not for a gradient."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OF_ENGINES)


def _gradient(
    function: Callable[[Tensor], Tensor],
    values: Callable[..., Tensor] | None,
    logits: Tensor,
    *factors: Any,
    grad: Tensor,
) -> Tensor:
    """Return the gradient of logits from that of what a function makes of them; it can be derived where a backward can.

    Args:
        function: of the logits.
        values: computes the logits of the factors; None where the gradient does not depend on them.
        logits: a tensor without memory at whose node the gradient arrives.
    """
    is_derived = torch.is_grad_enabled()

    def make() -> Tensor:
        return grad.new_zeros(()).to(logits.dtype).expand(logits.shape) if values is None else values(*factors)

    with torch.enable_grad():
        given = Same.apply(logits, make) if is_derived else make().detach().requires_grad_()
        result = function(given)
    return torch.autograd.grad(result, given, grad, create_graph=is_derived)[0]
