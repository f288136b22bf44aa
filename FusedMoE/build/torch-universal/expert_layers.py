"""The experts interface of transformers, experts that have none, and a block whose experts see every token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from ._common.modules import Layer
from .expert_activation import SWIGLU, Activation, recognised_activation
from .experts.expert_lists import is_silu
from .functional import fused_experts
from .module_guards import is_intercepted, is_replaced
from .ops import gmm, permutation
from .ops.gmm import GmmFunction


def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute the forward of a class that is decorated with transformers' ``use_experts_implementation``.

    It can be registered in ``ALL_EXPERTS_FUNCTIONS`` of transformers, integrations/moe.py, as it is. The flags that the
    decorator sets say how the weights lie; the formula and its limits are those of :func:`fused_moe.fused_experts`.

    Args:
        experts: the module.
        hidden_states: ``[T, H]``, of a floating dtype.
        top_k_index: int64 or int32 ``[T, k]``.
        top_k_weights: ``[T, k]``, of a floating dtype.

    Returns:
        ``[T, H]``, in the dtype of ``hidden_states``.

    Raises:
        ValueError: shapes or devices do not fit, or an index on the CPU is out of range.
        TypeError: dtypes do not.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    return fused_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        getattr(experts, first),
        experts.down_proj,
        getattr(experts, f"{first}_bias") if experts.has_bias else None,
        experts.down_proj_bias if experts.has_bias else None,
        activation=recognised_activation(experts),
        is_transposed=experts.is_transposed,
        is_expert_parallel=experts._is_expert_parallel,
        post_expert_norm=experts.post_expert_norm if experts.has_post_expert_norm else None,
    )


class ClampedExperts(Layer):
    """Computes experts with a gate of their own, ``_apply_gate``, and no experts interface, as Step-3.7 does.

    The forward takes tokens ``[T, H]``, indices and weights ``[T, k]``, and gives ``[T, H]``. An index that is the
    number of experts chooses none.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if _needs_original(hidden_states, self.gate_up_proj, self.down_proj):
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        weights = self.gate_up_proj, self.down_proj
        gate = self._apply_gate
        return fused_experts(
            hidden_states, top_k_index, top_k_weights, *weights, activation=gate, is_expert_parallel=True
        )


class FlatExperts(Layer):
    """Computes experts whose weights lie below each other, ``[E·I, H]`` for gate, up and down, as DBRX does.

    The forward takes tokens ``[T, H]``, indices and weights ``[T, k]``, and gives ``[T, 1, H]``.
    """

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        parameters = self.mlp.w1, self.mlp.v1, self.mlp.w2
        is_called = is_intercepted(self.mlp) or is_replaced(self.mlp)
        if is_called or _needs_original(hidden_states, *parameters) or not permutation.fits_sizes(*top_k_index.shape):
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        x = hidden_states.reshape(-1, self.hidden_size)
        gate, up, down = (each.view(-1, self.ffn_hidden_size, self.hidden_size) for each in parameters)
        if not gmm.fits(x, gate.mT, down):
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        index, weights = top_k_index.contiguous(), top_k_weights.contiguous()
        rows, order = permutation.PermuteFunction.apply(x, index)
        counts = permutation.tokens_per_expert(index, self.num_experts)
        activated = self.mlp.activation_fn(GmmFunction.apply(rows, gate.mT, counts, None, None))
        activated = activated * GmmFunction.apply(rows, up.mT, counts, None, None)
        rows = GmmFunction.apply(activated, down, counts, None, None)
        y = permutation.UnpermuteFunction.apply(rows, order, weights, index)
        return y.view(hidden_states.shape[0], -1, self.hidden_size)


class ScaledTokensMoEBlock(Layer):
    """Sends tokens, times their scores, to the experts that were chosen, as Llama 4 says; not zeros to all others.

    There each expert computes every token, those that it was not chosen for as zeros, of which it makes zeros. The
    forward takes ``[..., H]`` and gives ``[T, H]`` and the logits, ``[T, E]``.
    """

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        experts = self.experts
        is_called = is_intercepted(experts) or is_replaced(experts)
        if is_called or _needs_original(hidden_states, experts.gate_up_proj, experts.down_proj):
            return type(self).forward(self, hidden_states)
        x = hidden_states.reshape(-1, self.hidden_dim)
        scores, logits = self.router(x)
        chosen, index = scores.topk(self.router.top_k, dim=-1)
        rows = (x.unsqueeze(1) * chosen.unsqueeze(-1)).flatten(0, 1)
        index = index.view(-1, 1)
        routed = fused_experts(
            rows,
            index,
            torch.ones_like(index, dtype=rows.dtype),
            experts.gate_up_proj,
            experts.down_proj,
            activation=_block_activation(experts.act_fn),
            is_transposed=True,
        )
        y = self.shared_expert(x)
        routed = routed if chosen.shape[1] == 1 else routed.view(*chosen.shape, routed.shape[-1]).sum(dim=1)
        return y.add_(routed), logits


def _block_activation(activation: Callable[[Tensor], Tensor]) -> Activation:
    """Return what computes ``up * activation(gate)`` of both in one tensor, the gate first: SwiGLU, or a function."""
    is_called = isinstance(activation, nn.Module) and is_intercepted(activation)
    if not is_called and is_silu(activation):
        return SWIGLU

    def gate(gate_up: Tensor) -> Tensor:
        first, second = gate_up.chunk(2, -1)
        return second * activation(first)

    return gate


def _needs_original(hidden_states: Tensor, *parameters: Tensor) -> bool:
    """Tell whether the original forward has to compute: elsewhere, distributed, transformed, or in another dtype."""
    if hidden_states.device.type != "npu" or is_transformed() or is_distributed(hidden_states, *parameters):
        return True
    if torch.is_autocast_enabled("npu") and torch.get_autocast_dtype("npu") != hidden_states.dtype:
        return True
    return any((p.dtype, p.device) != (hidden_states.dtype, hidden_states.device) for p in parameters)
