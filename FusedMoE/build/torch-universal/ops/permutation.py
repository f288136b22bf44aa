"""Tokens brought into the order of the experts they go to, and back, with gradients in every release of torch_npu.

The operators have no derivative before op-plugin 7.2 (torch_npu 2.5.1 and 2.6.0), and since 7.2 operators for it. Where
they are missing, or wrong, the gradient is computed from the operators of the forward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.cann import CANN
from .._common.derivatives import gradients

_MOST_ROWS = (1 << 24) - 2  # npu_moe_token_permute sorts indices as float32
_MOST_CHOICES = 512

# CANN writes the gradient of the weights in their dtype, torch_npu makes room for it in that of the rows: op-plugin,
# op_plugin_functions.yaml of 7.2.0 and of the first wheels of 7.3.0; mended in 26.0.0, of CANN 9.0
_WEIGHTS_IN_ANY_DTYPE = CANN >= (9, 0)


# Above autograd the operator of newer releases returns the rows too, for its own gradient: that would be counted as
# moving them, and torch.compile takes no operator that returns its input. So it is called below autograd, under
# torch.compile inside of an operator of this kernel.
@torch.library.custom_op(f"{__name__.partition('.')[0]}::unpermute", mutates_args=())
def _unpermute_operator(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    return torch.ops.npu.npu_moe_token_unpermute(rows, order, weights)


@_unpermute_operator.register_fake
def _(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(weights.shape[0], rows.shape[1])


def fits_sizes(tokens: int, top_k: int) -> bool:
    """Tell whether the operators take an index ``[tokens, top_k]``.

    CANN, aclnnMoeTokenPermute and aclnnMoeTokenUnpermute, Atlas A2 and A3.
    """
    return 0 < tokens * top_k < _MOST_ROWS and top_k <= _MOST_CHOICES


def has_gradients() -> bool:
    """Tell whether torch_npu has operators for the gradients."""
    to_permute = hasattr(torch.ops.npu, "npu_moe_token_permute_grad")
    return to_permute and hasattr(torch.ops.npu, "npu_moe_token_unpermute_grad")


def tokens_per_expert(top_k_index: Tensor, num_experts: int) -> Tensor:
    """Count the rows that go to each expert, int64 ``[E]``; ids of ``num_experts`` and more are not counted.

    One bin more than there are experts, and bounds that are its first and last id, put id i into bin i: it is the
    whole part of i · (E + 1) / E. The last bin takes the rows that go to no expert here.
    """
    counts = torch.histc(top_k_index, bins=num_experts + 1, min=0, max=num_experts)
    return counts[:num_experts].to(torch.int64)


def tail_mask(counts: Tensor, rows: int) -> Tensor:
    """Mark the rows after the last group, whose experts are elsewhere: boolean ``[rows, 1]``."""
    return (torch.arange(rows, device=counts.device) >= counts.sum()).unsqueeze(-1)


def permute(tokens: Tensor, top_k_index: Tensor) -> tuple[Tensor, Tensor]:
    """Copy tokens ``[T, H]`` to rows by expert, ``[T·k, H]``, and tell the row of each choice, int32 ``[T·k]``."""
    return torch.ops.npu.npu_moe_token_permute(tokens, top_k_index)


def permute_gradient(grad: Tensor, tokens: Tensor, top_k_index: Tensor, order: Tensor) -> Tensor:
    """Sum the gradients of each token's rows, ``[T·k, H]`` to ``[T, H]``."""
    if has_gradients():
        return torch.ops.npu.npu_moe_token_permute_grad(tokens, grad, top_k_index, order)
    return unpermute(grad, order, torch.ones_like(top_k_index, dtype=grad.dtype))


def unpermute(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's rows, each times its weight ``[T, k]``, in float32: ``[T·k, H]`` to ``[T, H]``."""
    if torch.compiler.is_compiling():
        return _unpermute_operator(rows, order, weights)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.npu.npu_moe_token_unpermute(rows, order, weights)


def unpermute_gradient(
    grad: Tensor, rows: Tensor, order: Tensor, weights: Tensor, top_k_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``rows``, ``[T·k, H]``, and of ``weights``, ``[T, k]``."""
    if has_gradients() and (_WEIGHTS_IN_ANY_DTYPE or weights.dtype is rows.dtype):
        return torch.ops.npu.npu_moe_token_unpermute_grad(rows, grad, order, weights)
    place = order.long()
    sorted_weights = torch.empty_like(weights).view(-1).scatter_(0, place, weights.reshape(-1)).unsqueeze(-1)
    repeated, _ = permute(grad, top_k_index)
    d_weights = (repeated.float() * rows.float()).sum(-1)[place].view_as(weights).to(weights.dtype)
    return (repeated.float() * sorted_weights.float()).to(rows.dtype), d_weights


class PermuteFunction(torch.autograd.Function):
    """Does what :func:`permute` does, and is differentiable."""

    @staticmethod
    def forward(ctx, tokens: Tensor, top_k_index: Tensor) -> tuple[Tensor, Tensor]:
        rows, order = permute(tokens, top_k_index)
        ctx.save_for_backward(tokens, top_k_index, order)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)  # no zeros for the order
        return rows, order

    @staticmethod
    def backward(ctx, grad: Tensor | None, _: None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        tokens, top_k_index, order = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            return _unpermute_in_torch(grad, order, torch.ones_like(top_k_index, dtype=grad.dtype)), None
        return permute_gradient(grad.contiguous(), tokens, top_k_index, order), None


class UnpermuteFunction(torch.autograd.Function):
    """Does what :func:`unpermute` does, and is differentiable."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, weights: Tensor, top_k_index: Tensor) -> Tensor:
        ctx.save_for_backward(rows, order, weights, top_k_index)
        return unpermute(rows, order, weights)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, order, weights, top_k_index = ctx.saved_tensors
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            inputs = rows, order, weights
            return *gradients(_unpermute_in_torch, inputs, ctx.needs_input_grad[:3], grad), None
        d_rows, d_weights = unpermute_gradient(grad.contiguous(), rows, order, weights, top_k_index)
        return d_rows, None, d_weights, None


def _unpermute_in_torch(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Compute what :func:`unpermute` does with operators of torch."""
    by_choice = rows[order.long()].unflatten(0, weights.shape)
    return (by_choice.float() * weights.unsqueeze(-1).float()).sum(1).to(rows.dtype)
