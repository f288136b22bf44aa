"""The experts of a module of transformers, as its attributes describe them."""

from __future__ import annotations

from torch import Tensor, nn

from .functional import fused_experts
from .gates import activation_of


def experts_forward(experts: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a class decorated with transformers' ``use_experts_implementation``.

    Serves ``ALL_EXPERTS_FUNCTIONS`` as it is. The flags that the decorator sets say how the weights lie; the rest is
    said by :func:`fused_moe.fused_experts`.

    Args:
        experts: the module.
        hidden_states: ``[T, H]``.
        top_k_index: ``[T, k]``.
        top_k_weights: ``[T, k]``.

    Returns:
        ``[T, H]``.
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
        activation=activation_of(experts),
        is_transposed=experts.is_transposed,
        is_expert_parallel=experts._is_expert_parallel,
        post_expert_norm=experts.post_expert_norm if experts.has_post_expert_norm else None,
    )
