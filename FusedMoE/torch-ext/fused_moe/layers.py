"""Layers whose forward `kernels` binds to modules of transformers. They read the weights of what they replace."""

from __future__ import annotations

from torch import Tensor, nn

from .experts import experts_forward


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class MoEExperts(_Layer):
    """Experts with their weights in one tensor for each projection: every class with transformers' experts interface."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
