"""Layers whose forward `kernels` binds to modules of transformers. They read the weights of what they replace."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .blocks import experts_of, listed_experts
from .experts import experts_forward
from .router import softmax_top_k


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class MoEExperts(_Layer):
    """Experts whose weights are one tensor for each projection: every class with transformers' experts interface."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class SoftmaxTopKRouter(_Layer):
    """Experts by softmax, as in Qwen3-MoE: weights divided by their sum unless ``norm_topk_prob`` is false."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, experts = _route(self, hidden_states)
        return logits, weights.to(logits.dtype), experts


class SoftmaxTopKRouterFloat32(_Layer):
    """The same with weights that stay in float32, as in Mixtral."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _route(self, hidden_states)


class SparseMoEBlock(_Layer):
    """Experts in a list by softmax, as in transformers 4: Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE, Qwen3-Next.

    Weights are divided by their sum unless ``norm_topk_prob`` is false. With ``shared_expert`` where there is one, and
    with noise on the tokens in training where ``jitter_noise`` says so.
    """

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        experts = experts_of(self, hidden_states, self.top_k)
        if experts is None:
            return type(self).forward(self, hidden_states)  # the original's: this is bound to an instance of it
        if self.training and getattr(self, "jitter_noise", 0) > 0:
            noise = torch.empty_like(hidden_states).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
            hidden_states *= noise
        x = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        weights, index = softmax_top_k(logits, self.top_k, getattr(self, "norm_topk_prob", True))
        y = listed_experts(experts, x, index, weights.to(x.dtype))
        if hasattr(self, "shared_expert"):
            y = y + F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y.reshape(hidden_states.shape), logits


class GatedMoEBlock(_Layer):
    """Experts in a list and a gate that chooses them, as in transformers 4: DeepSeek-V2 and V3, GLM-4-MoE, Dots."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        index, weights = self.gate(hidden_states)
        x = hidden_states.view(-1, hidden_states.shape[-1])
        experts = experts_of(self, x, index.shape[1])
        y = self.moe(x, index, weights) if experts is None else listed_experts(experts, x, index, weights)
        return y.view(hidden_states.shape) + self.shared_experts(hidden_states)


def _route(router: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    return logits, *softmax_top_k(logits, router.top_k, getattr(router, "norm_topk_prob", True))
