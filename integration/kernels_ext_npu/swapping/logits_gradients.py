"""Lets the gradient of a loss pass by logits that nobody looked at, unless somebody asks for theirs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

_OF_ENGINES = "torch.distributed."  # FSDP's hooks gather weights when a gradient arrives, whatever it is


class Logits(Protocol):
    """Logits that may not be computed.

    Attributes:
        known: the tensor that they are, once somebody has looked.
        parent: what they were made of without looking; None for what the head returned.
    """

    known: Tensor | None
    parent: Any
    retains_grad: bool
    _backward_hooks: dict[int, Any] | None

    def unchanged(self) -> Tensor:
        """Return them as they were when the model was called."""


class PassBy(torch.autograd.Function):
    """The node between a loss and the logits that it was computed without.

    ``apply(loss, logits, plain)`` returns the loss itself. In the backward it goes on to what computed it, or, when
    somebody asks for the gradient of the logits, to these, with the gradient of ``plain(logits)``.
    """

    @staticmethod
    def forward(ctx, loss: Tensor, logits: Any, plain: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.mark_dirty(loss)  # neither a copy nor a view: a Trainer multiplies it in place
        ctx.set_materialize_grads(False)
        ctx.logits, ctx.plain = logits, plain
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor | None) -> tuple[Tensor | None, Tensor | None, None]:
        if grad is None or not _is_asked_for(ctx.logits, ctx.next_functions[0][0]):
            return grad, None, None
        return None, gradient_of(ctx.plain, ctx.logits, grad), None


def gradient_of(function: Callable[[Tensor], Tensor], logits: Logits, grad: Tensor) -> Tensor:
    """Return the gradient of logits from that of what a function makes of them; in a backward, which may be derived."""
    is_derived = torch.is_grad_enabled()
    with torch.enable_grad():
        given = logits.unchanged()
        given = given if is_derived else given.detach().requires_grad_()
        result = function(given)
    return torch.autograd.grad(result, given, grad, create_graph=is_derived)[0]


def is_of_an_engine(hook: Any) -> bool:
    """Tell whether a hook of a tensor waits for the backward alone, and not for a gradient."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith(_OF_ENGINES)


def _is_asked_for(logits: Logits, loss: Any) -> bool:
    """Tell whether somebody waits for the gradient of logits, by a hook, or by `torch.autograd.grad`.

    In the latter nothing else may be wanted of the loss. What was made of the logits and looked at would have another
    part of its gradient elsewhere.
    """
    chain = [logits]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    head = chain[-1]
    if head.retains_grad or not all(map(is_of_an_engine, (head._backward_hooks or {}).values())):
        return True
    return not torch._C._will_engine_execute_node(loss) and all(each.known is None for each in chain[:-1])
