"""The experts interface of transformers: the forward of its experts modules, as their attributes describe them."""

from __future__ import annotations

from torch import Tensor, nn

from ..activation.expert_activation import recognised_activation
from ..functional import fused_experts


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
