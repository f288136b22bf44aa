"""Who differentiates otherwise than by one backward: again, several at once, forward, or by torch.func.

Operators of torch have rules for all of that. Those of torch_npu have none: tangents and derivatives of gradients would
be lost without a word, and torch.func takes no node of autograd that is written in Python as ours are. So the same
formula is computed in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad


def needs_grad(*tensors: Tensor | None) -> bool:
    """Tell whether a gradient is asked for of one of the tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], needs: Sequence[bool], grad: Tensor
) -> list[Tensor | None]:
    """Compute the gradients of a function, so that they can be differentiated themselves where gradients are enabled.

    A backward calls it there, as ``create_graph`` enables them, and where no operator takes what it has; otherwise
    operators of torch_npu compute them, which have no derivative.

    Args:
        function: takes ``inputs``, and computes one tensor with operators of torch.
        inputs: what the forward got.
        needs: of which of them the gradient is wanted.
        grad: the gradient of the function's value.

    Returns:
        A gradient for each of ``inputs`` that needs one, None for the others.
    """
    # one may be computed from another, as routing weights are from tokens: what leads from one to the other is left out
    is_derived = torch.is_grad_enabled()
    with torch.enable_grad():
        apart = [_alias(tensor) if needed else tensor for tensor, needed in zip(inputs, needs)]
        wanted = [tensor for tensor, needed in zip(apart, needs) if needed]
        y = function(*apart).to(grad.dtype)
    found = iter(torch.autograd.grad(y, wanted, grad, create_graph=is_derived, materialize_grads=True))
    return [next(found) if needed else None for needed in needs]


def by_formula(*grads: Tensor | None) -> bool:
    """Tell whether a backward computes by operators of torch: to be differentiated, or of several gradients at once.

    ``torch.autograd.grad(is_grads_batched=True)`` asks for several. Operators of torch have rules for that; what writes
    into lists or ``out=``, as operators of torch_npu do, has none.
    """
    if torch.is_grad_enabled():
        return not torch.compiler.is_compiling()
    if torch.compiler.is_dynamo_compiling():  # it does not know the question, and compiles a backward without gradients
        return False
    for grad in grads:  # noqa: SIM110 - a generator would be three more calls in every backward
        if grad is not None and _functorch.is_legacy_batchedtensor(grad):
            return True
    return False


def is_transformed() -> bool:
    """Tell whether a transform of torch.func runs, or derivatives are computed forward."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _alias(tensor: Tensor | None) -> Tensor:
    """Return a tensor with the same values that takes a gradient of its own."""
    assert tensor is not None
    return tensor.view_as(tensor) if tensor.requires_grad else tensor.detach().requires_grad_()
