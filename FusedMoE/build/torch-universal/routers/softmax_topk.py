"""What routers do with their logits: choose the experts with the largest softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.derivatives import is_transformed
from .._common.distributed import is_distributed

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_CHOICES = 1024


def softmax_top_k(logits: Tensor, k: int, renormalise: bool = True) -> tuple[Tensor, Tensor]:
    """Return the k largest of ``softmax(logits, -1)``, in float32, divided by their sum if asked for. Differentiable.

    That is Qwen3MoeTopKRouter.forward of transformers, models/qwen3_moe/modeling_qwen3_moe.py, after its product. Where
    no gradient is needed softmax and top-k are one launch, of ``npu_moe_gating_top_k_softmax``. Of experts with equal
    probability the one with the lower index comes first there; torch.topk leaves open which does.

    Args:
        logits: ``[T, E]``, float16, bfloat16 or float32.
        k: from 1 to E.
        renormalise: divide by the sum of the k.

    Returns:
        The weights, float32 ``[T, k]``, from the largest on, and the experts, int64 ``[T, k]``.

    Raises:
        ValueError: ``logits`` is not two-dimensional, or ``k`` is out of range.
        TypeError: ``logits`` is not floating point.
    """
    if logits.dim() != 2 or not 1 <= k <= logits.shape[-1]:
        raise ValueError(
            f"softmax_top_k: logits must be [T, E] and k from 1 to E, got {list(logits.shape)} and k = {k}"
        )
    if not logits.is_floating_point():
        raise TypeError(f"softmax_top_k: logits must be floating point, got {logits.dtype}")
    if logits.dtype is torch.float64:  # before the node: the NPU has no cast to it, which its gradient would need
        logits = logits.float()
    if is_distributed(logits) or is_transformed():
        return _in_torch(logits, k, renormalise)[:2]
    if torch.is_grad_enabled() and logits.requires_grad:
        return _SoftmaxTopK.apply(logits, k, renormalise)[:2]
    if not _is_fused(logits, k):
        return _in_torch(logits, k, renormalise)[:2]
    # float32: of bfloat16 the operator rounds the weights, and of float16 also what it compares
    weights, experts, _ = torch.ops.npu.npu_moe_gating_top_k_softmax(logits.float(), None, k)
    return _renormalised(weights) if renormalise else weights, experts.long()


def _is_fused(logits: Tensor, k: int) -> bool:
    """Tell whether the operator takes them: op-plugin, docs/zh/custom_APIs/torch_npu, Atlas A2 and A3."""
    return logits.device.type == "npu" and logits.dtype in _FUSED_DTYPES and k <= _MOST_CHOICES and logits.numel() > 0


def _in_torch(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Compute weights and experts in torch, and give all probabilities, ``[T, E]``, beside them."""
    probabilities = torch.softmax(logits, -1, dtype=torch.float32)
    weights, experts = probabilities.topk(k, -1)
    return _renormalised(weights) if renormalise else weights, experts, probabilities


def _renormalised(weights: Tensor) -> Tensor:
    """Divide the weights of each token by their sum."""
    return weights / weights.sum(-1, keepdim=True)


class _SoftmaxTopK(torch.autograd.Function):
    """Computes them in torch, and keeps for the gradient what it needs.

    Divided by their sum, the k largest of a softmax are the softmax of the k largest: then these k are all that is
    kept.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        weights, experts, probabilities = _in_torch(logits, k, renormalise)
        # an output that is kept has a derivative itself, which second derivatives go through
        ctx.save_for_backward(weights if renormalise else probabilities, experts)
        ctx.renormalise, ctx.shape, ctx.dtype = renormalise, logits.shape, logits.dtype
        ctx.mark_non_differentiable(experts)
        ctx.set_materialize_grads(False)  # no zeros for the experts
        return weights, experts, None if renormalise else probabilities

    @staticmethod
    def backward(ctx, grad: Tensor | None, _: None, d_probabilities: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None and d_probabilities is None:
            return None, None, None
        kept, experts = ctx.saved_tensors
        if ctx.renormalise:
            grad = torch.ops.aten._softmax_backward_data(grad, kept, -1, kept.dtype).to(ctx.dtype)
        if grad is not None:
            grad = grad.new_zeros(ctx.shape).scatter_(-1, experts, grad)
        if not ctx.renormalise:
            grad = d_probabilities if grad is None else grad if d_probabilities is None else grad + d_probabilities
            grad = torch.ops.aten._softmax_backward_data(grad, kept, -1, kept.dtype).to(ctx.dtype)
        return grad, None, None
