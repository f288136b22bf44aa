"""Layers whose forward `kernels` binds to modules of transformers. They read the weights of what they replace."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.modules import Layer as _Layer
from .expert_layers import ClampedExperts, FlatExperts, ScaledTokensMoEBlock, experts_forward
from .experts.expert_lists import fusable_experts, fused_listed_experts
from .routers.router_layers import (
    BiasedSoftmaxTopKRouter,
    CorrectedSoftmaxTopKRouter,
    GroupedSoftmaxTopKRouter,
    GroupedSoftmaxTopKRouterNarrow,
    GroupedSoftmaxTopKRouterNormalised,
    SigmoidScatterRouter,
    SigmoidTopKRouter,
    SigmoidTopKRouterGivenBias,
    SigmoidTopKRouterLinear,
    SigmoidTopKRouterMultiplied,
    SigmoidTopKRouterNarrow,
    SigmoidTopKRouterNarrowGivenBias,
    SigmoidTopKRouterNormalised,
    SigmoidTopKRouterSoftcapped,
    SigmoidTopKRouterUnbiased,
    SigmoidTopKRouterUngrouped,
    SoftmaxTopKRouter,
    SoftmaxTopKRouterFloat32,
    SoftmaxTopKRouterInFloat32,
    SoftmaxTopKRouterLinear,
    SoftmaxTopKRouterUnnormalised,
    TopKRouter,
    TopKSoftmaxRouter,
)
from .routers.softmax_topk import softmax_top_k


class MoEExperts(_Layer):
    """Computes experts whose weights are one tensor for each projection: any with transformers' experts interface."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class SparseMoEBlock(_Layer):
    """Sends tokens to experts in a list by softmax, as in transformers 4.

    That is Mixtral, OLMoE, Qwen2-MoE, Qwen3-MoE and Qwen3-Next. Weights are divided by their sum unless
    ``norm_topk_prob`` is false. ``shared_expert`` is added where there is one, and noise multiplies the tokens in
    training where ``jitter_noise`` says so. The forward takes ``[B, S, H]`` and gives that and the
    logits, ``[B·S, E]``.
    """

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        experts = fusable_experts(self, hidden_states, self.top_k)
        if experts is None:
            return type(self).forward(self, hidden_states)  # the original's: this is bound to an instance of it
        if self.training and getattr(self, "jitter_noise", 0) > 0:
            noise = torch.empty_like(hidden_states).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
            hidden_states *= noise
        x = hidden_states.view(-1, hidden_states.shape[-1])
        logits = self.gate(x)
        weights, index = softmax_top_k(logits, self.top_k, getattr(self, "norm_topk_prob", True))
        y = fused_listed_experts(experts, x, index, weights.to(x.dtype))
        if hasattr(self, "shared_expert"):
            y = y + F.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)
        return y.reshape(hidden_states.shape), logits


class GatedMoEBlock(_Layer):
    """Sends tokens to experts in a list that its gate chooses, as in transformers 4.

    That is DeepSeek-V2 and V3, GLM-4-MoE and Dots. The forward takes and gives ``[B, S, H]``.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        index, weights = self.gate(hidden_states)
        x = hidden_states.view(-1, hidden_states.shape[-1])
        experts = fusable_experts(self, x, index.shape[1])
        y = self.moe(x, index, weights) if experts is None else fused_listed_experts(experts, x, index, weights)
        return y.view(hidden_states.shape) + self.shared_experts(hidden_states)
