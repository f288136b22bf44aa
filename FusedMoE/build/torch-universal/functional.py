"""Mixtures of experts as functions of tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .checks import check_experts, check_indices, check_product
from .expert_activation import SWIGLU, Activation, Gate, GateFunction
from .experts.stacked_autograd import StackedExpertsFunction, stacked_experts
from .gather_dtensor import call_on_gathered
from .ops import gmm, permutation
from .ops.gmm import GmmFunction
from .ops.reference import experts_in_torch, product_in_torch


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``x[r] @ weight[e] + bias[e]`` for the rows of each group, one group after the other. Differentiable.

    It is one launch of ``npu_grouped_matmul``, and one for each gradient that is asked for. What that does not take
    (more than 1024 groups, last dimensions of 65536 and more, other dtypes, weights that are neither contiguous nor a
    transposed view, the CPU) is computed group by group in torch, for which the host waits for ``counts``.

    Args:
        x: ``[M, K]``, float16, bfloat16 or float32.
        weight: ``[E, K, N]``, of the dtype of ``x``.
        counts: the rows of each group, int64 ``[E]``, on the device of ``x``; they must add up to M, which is not
            checked on the NPU.
        bias: ``[E, N]``, of any floating dtype: in bfloat16 products it is added in float32, otherwise in theirs.

    Returns:
        ``[M, N]``, in the dtype of ``x``.

    Raises:
        ValueError: shapes or devices do not fit.
        TypeError: dtypes do not.
    """
    if is_distributed(x, weight, counts, bias):
        return call_on_gathered(grouped_matmul, x, weight, counts, bias)
    check_product(x, weight, counts, bias)
    if is_transformed() or not gmm.fits(x, weight):
        return product_in_torch(x, weight, counts, bias)
    return GmmFunction.apply(x.contiguous(), weight, counts, bias, None)


def fused_experts(
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    gate_up_proj_bias: Tensor | None = None,
    down_proj_bias: Tensor | None = None,
    *,
    activation: Activation = SWIGLU,
    is_transposed: bool = False,
    is_expert_parallel: bool = False,
    post_expert_norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Compute the experts of a mixture on the tokens that a router sent to them, weighed and summed. Differentiable.

    The formula is that of transformers, integrations/moe.py, grouped_mm_experts_forward. On the NPU it is permute,
    product, activation, product, unpermute, without waiting for the device; stacked_autograd.py says what is kept for
    the gradient of a :class:`Gate`. What the operators do not take (more than 1024 experts, 512 choices or 2^24 - 2
    rows, last dimensions of 65536 and more, other dtypes, the CPU) is computed expert by expert in torch, for which the
    host waits for how many rows each gets.

    Args:
        hidden_states: ``[T, H]``. Computed with in the dtype of the weights, and given back in its own.
        top_k_index: int64 or int32 ``[T, k]``, from 0 to E - 1. That is checked on the CPU only.
        top_k_weights: ``[T, k]``, of any floating dtype.
        gate_up_proj: ``[E, 2·I, H]``; ``[E, I, H]`` where ``activation`` does not gate.
        down_proj: ``[E, H, I]``, in the dtype of ``gate_up_proj``.
        gate_up_proj_bias: ``[E, 2·I]``.
        down_proj_bias: ``[E, H]``.
        activation: from the first product to what the second is computed of: a :class:`Gate`, or any function of rows.
        is_transposed: the weights are ``[E, H, 2·I]`` and ``[E, I, H]``.
        is_expert_parallel: ``top_k_index`` may be E, for an expert that lives elsewhere: such a choice adds nothing and
            has no gradient.
        post_expert_norm: a function of the rows that the second product gives.

    Returns:
        ``[T, H]``, in the dtype of ``hidden_states``.

    Raises:
        ValueError: shapes or devices do not fit, or an index on the CPU is out of range.
        TypeError: dtypes do not.
    """
    if is_distributed(hidden_states, gate_up_proj, down_proj):
        options = {"activation": activation, "is_transposed": is_transposed, "is_expert_parallel": is_expert_parallel}
        function = partial(fused_experts, **options, post_expert_norm=post_expert_norm)
        biases = gate_up_proj_bias, down_proj_bias
        return call_on_gathered(function, hidden_states, top_k_index, top_k_weights, gate_up_proj, down_proj, *biases)
    gate_up, down = (gate_up_proj, down_proj) if is_transposed else (gate_up_proj.mT, down_proj.mT)
    parameters = (gate_up, down, gate_up_proj_bias, down_proj_bias)
    is_gate = isinstance(activation, Gate)
    check_experts(hidden_states, top_k_index, top_k_weights, *parameters, halves=is_gate)
    check_indices(top_k_index, down.shape[0] if is_expert_parallel else down.shape[0] - 1)
    x = hidden_states if hidden_states.dtype is gate_up.dtype else hidden_states.to(gate_up.dtype)
    if is_transformed() or not (gmm.fits(x, gate_up, down) and permutation.fits_sizes(*top_k_index.shape)):
        y = experts_in_torch(x, top_k_index, top_k_weights, *parameters, activation, post_expert_norm)
        return y.to(hidden_states.dtype)
    x, top_k_index, top_k_weights = x.contiguous(), top_k_index.contiguous(), top_k_weights.contiguous()
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, top_k_weights, *parameters))
    is_fused = is_gate and activation.fits(gate_up.shape[-1], x.dtype, trains)
    if is_fused and post_expert_norm is None:
        run = StackedExpertsFunction.apply if trains else stacked_experts
        y = run(activation, x, top_k_index, top_k_weights, *parameters, is_expert_parallel)
    else:
        rows, order = permutation.PermuteFunction.apply(x, top_k_index)
        counts = permutation.tokens_per_expert(top_k_index, down.shape[0])
        tail = permutation.tail_mask(counts, rows.shape[0]) if is_expert_parallel else None
        rows = GmmFunction.apply(rows, gate_up, counts, gate_up_proj_bias, tail)
        rows = GateFunction.apply(activation, rows) if is_fused else activation(rows)
        rows = GmmFunction.apply(rows.contiguous(), down, counts, down_proj_bias, tail)
        rows = rows if post_expert_norm is None else post_expert_norm(rows)
        y = permutation.UnpermuteFunction.apply(rows.contiguous(), order, top_k_weights, top_k_index)
    return y if y.dtype is hidden_states.dtype else y.to(hidden_states.dtype)
