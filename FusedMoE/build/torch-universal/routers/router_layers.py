"""Layers whose forward `kernels` binds to routers of transformers. What a router reads is read in every forward."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .._common.autocast import autocast_dtype, without_autocast
from .._common.modules import Layer
from ..module_guards import is_intercepted, is_replaced
from .grouped_topk import gating_top_k
from .router_product import float32_logits
from .softmax_topk import softmax_top_k

Routed = tuple[Tensor, Tensor, Tensor]


class SoftmaxTopKRouter(Layer):
    """Chooses experts by softmax, as Qwen3-MoE does: divides by the sum unless ``norm_topk_prob`` is false.

    The forward takes ``[..., H]`` and gives logits ``[T, E]``, weights ``[T, k]`` in their dtype and indices, int64
    ``[T, k]``.
    """

    def forward(self, hidden_states: Tensor) -> Routed:
        logits, weights, experts = _by_softmax(self, hidden_states)
        return logits, weights.to(logits.dtype), experts


class SoftmaxTopKRouterFloat32(Layer):
    """Chooses experts by softmax, with weights that stay in float32, as Mixtral does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        return _by_softmax(self, hidden_states)


class SigmoidTopKRouter(Layer):
    """Chooses experts by sigmoid, bias and groups in float32, as DeepSeek-V3, GLM-4-MoE and Kimi do.

    The forward takes ``[..., H]`` and gives logits and weights in float32, and indices, int64. Weights are divided by
    their sum unless ``norm_topk_prob`` is false, and multiplied with ``routed_scaling_factor`` where there is one.
    """

    def forward(self, hidden_states: Tensor) -> Routed:
        logits = float32_logits(hidden_states.view(-1, self.hidden_dim), self.weight)
        weights, experts = gating_top_k(
            logits,
            self.top_k,
            self.e_score_correction_bias,
            groups=self.num_group,
            top_groups=self.topk_group,
            renormalise=self.norm_topk_prob,
            scale=getattr(self, "routed_scaling_factor", 1.0),
        )
        return logits, weights, experts


class SigmoidTopKRouterUngrouped(Layer):
    """Does the same where ``num_group`` is None, as AXK2 may have it; its groups are another formula."""

    def forward(self, hidden_states: Tensor) -> Routed:
        if self.num_group is not None:
            return type(self).forward(self, hidden_states)  # the original's: this is bound to an instance of it
        logits = float32_logits(hidden_states.view(-1, self.hidden_dim), self.weight)
        bias, divides, scale = self.e_score_correction_bias, self.norm_topk_prob, self.routed_scaling_factor
        return logits, *gating_top_k(logits, self.top_k, bias, renormalise=divides, scale=scale)


class SigmoidTopKRouterGivenBias(Layer):
    """Chooses experts by sigmoid and a bias that it is given, in float32, as HYV3 does."""

    def forward(self, hidden_states: Tensor, e_score_correction_bias: Tensor) -> Routed:
        if autocast_dtype(hidden_states) is not None:  # the original's divides in float32 what is narrower
            return type(self).forward(self, hidden_states, e_score_correction_bias)
        logits = float32_logits(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        return logits, *gating_top_k(logits, self.top_k, e_score_correction_bias, scale=self.router_scaling_factor)


class SigmoidTopKRouterNarrow(Layer):
    """Chooses experts by sigmoid and bias, with logits in the dtype of the weight, as MiniMax-M3 and Step-3.7 do."""

    def forward(self, hidden_states: Tensor) -> Routed:
        return _by_narrow_sigmoid(self, hidden_states, self.e_score_correction_bias)


class SigmoidTopKRouterNarrowGivenBias(Layer):
    """Does the same with a bias that it is given, as MiniMax-M2 does."""

    def forward(self, hidden_states: Tensor, e_score_correction_bias: Tensor) -> Routed:
        return _by_narrow_sigmoid(self, hidden_states, e_score_correction_bias)


class SigmoidTopKRouterUnbiased(Layer):
    """Chooses experts by sigmoid alone, in float32 under autocast too, as Flint does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        x = hidden_states.reshape(-1, self.hidden_dim)
        with without_autocast(x):
            logits = float32_logits(x, self.weight)
        return logits, *gating_top_k(logits, self.top_k, renormalise=self.norm_topk_prob, epsilon=0.0)


class SigmoidTopKRouterLinear(Layer):
    """Chooses experts by sigmoid and a bias that it is given, with a linear layer as its gate, as AFMoE does.

    The forward takes ``[B, S, H]``.
    """

    def forward(self, hidden_states: Tensor, expert_bias: Tensor) -> Routed:
        logits = self.gate(hidden_states.view(-1, hidden_states.shape[-1])).to(torch.float32)
        return logits, *gating_top_k(logits, self.top_k, expert_bias, scale=self.route_scale)


class SigmoidTopKRouterSoftcapped(Layer):
    """Chooses experts by sigmoid and bias, of logits that a tanh bounds, as Laguna does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        logits = F.linear(hidden_states.reshape(-1, self.hidden_dim), self.weight).float()
        if self.router_logit_softcapping > 0.0:
            logits = torch.tanh(logits / self.router_logit_softcapping) * self.router_logit_softcapping
        weights, experts = gating_top_k(logits, self.top_k, self.e_score_correction_bias, epsilon=0.0)
        return logits, weights.to(hidden_states.dtype), experts


class SigmoidTopKRouterMultiplied(Layer):
    """Chooses experts by sigmoid and bias, of logits times ``output_multiplier``, as Muse Spark does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        other = type(self.scoring_function) is not nn.Sigmoid or is_intercepted(self.scoring_function)
        if other or autocast_dtype(hidden_states) is not None:
            return type(self).forward(self, hidden_states)  # the original's: this is bound to an instance of it
        logits = float32_logits(hidden_states.view(-1, self.hidden_dim), self.weight) * self.output_multiplier
        bias, scale, epsilon = self.e_score_correction_bias, self.routed_scaling_factor, self.norm_topk_prob_eps
        return logits, *gating_top_k(logits, self.top_k, bias, scale=scale, epsilon=epsilon)


class SigmoidTopKRouterNormalised(Layer):
    """Chooses experts by sigmoid and bias, in float32, with weights that are always divided, as Inkling 2 does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        other = type(self.score_fn) is not nn.Sigmoid or is_intercepted(self.score_fn)
        if other or autocast_dtype(hidden_states) is not None:
            return type(self).forward(self, hidden_states)  # the original's: this is bound to an instance of it
        logits = float32_logits(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        bias, scale = self.e_score_correction_bias, self.routed_scaling_factor
        return logits, *gating_top_k(logits, self.top_k, bias, scale=scale)


class GroupedSoftmaxTopKRouter(Layer):
    """Chooses experts by softmax, by ``topk_method`` among the groups with the best ones, as DeepSeek-V2 does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        if self.topk_method not in ("greedy", "group_limited_greedy"):
            return type(self).forward(self, hidden_states)  # the original's: this is bound to an instance of it
        logits = float32_logits(hidden_states.view(-1, self.hidden_dim), self.weight)
        grouped = self.topk_method == "group_limited_greedy"
        weights, experts = gating_top_k(
            logits.float(),
            self.top_k,
            scores="softmax",
            groups=self.num_group if grouped else 1,
            top_groups=self.topk_group if grouped else 1,
            group_scores="best",
            renormalise=False,
            scale=self.routed_scaling_factor,
        )
        return logits, weights, experts


class GroupedSoftmaxTopKRouterNormalised(Layer):
    """Chooses experts by softmax in float32 among the groups with the best two, as Mistral Large 4 does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        logits = float32_logits(hidden_states.view(-1, self.hidden_dim), self.weight)
        return logits, *_among_groups(self, logits, renormalise=True)


class GroupedSoftmaxTopKRouterNarrow(Layer):
    """Does the same with logits in the dtype of the model, unless ``norm_topk_prob`` is false, as Mistral 4 does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        logits = F.linear(hidden_states.view(-1, self.hidden_dim), self.weight)
        return logits, *_among_groups(self, logits, renormalise=self.norm_topk_prob)


class BiasedSoftmaxTopKRouter(Layer):
    """Chooses experts by softmax and bias in float32, with weights that are not divided, as LongCat-Flash does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        logits = float32_logits(hidden_states.view(-1, self.hidden_dim), self.classifier.weight)
        bias, scale = self.e_score_correction_bias, self.routed_scaling_factor
        weights, experts = gating_top_k(logits, self.top_k, bias, scores="softmax", renormalise=False, scale=scale)
        return logits, weights, experts


class CorrectedSoftmaxTopKRouter(Layer):
    """Chooses experts by softmax and bias, and divides by their sum or ``norm_min``, as Ernie 4.5 does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        if is_intercepted(self.moe_statics) or is_replaced(self.moe_statics):
            return type(self).forward(self, hidden_states)  # the original's: this is bound to an instance of it
        bias = self.moe_statics.e_score_correction_bias.squeeze()
        with without_autocast(hidden_states):
            logits = float32_logits(hidden_states, self.weight)
            weights, experts = gating_top_k(logits, self.top_k, bias, scores="softmax", renormalise=False)
            weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=self.norm_min)
        return logits, weights.to(hidden_states.dtype), experts


class SoftmaxTopKRouterUnnormalised(Layer):
    """Chooses experts by softmax, with weights that are not divided by their sum, as Jamba does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        logits = F.linear(hidden_states, self.weight)
        weights, experts = softmax_top_k(logits, self.top_k, renormalise=False)
        return logits, weights.to(hidden_states.dtype), experts


class SoftmaxTopKRouterInFloat32(Layer):
    """Chooses experts by the softmax of logits in float32, with weights in the dtype of x, as LaraMini does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        logits = float32_logits(hidden_states.reshape(-1, self.hidden_dim), self.weight)
        weights, experts = softmax_top_k(logits, self.top_k, renormalise=self.norm_topk_prob)
        return logits, weights.to(hidden_states.dtype), experts


class SoftmaxTopKRouterLinear(Layer):
    """Chooses experts by softmax, with a linear layer as its gate, as HunYuan does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.wg(x.float() if self.wg.weight.dtype == torch.float32 else x)
        weights, experts = softmax_top_k(logits, self.top_k)
        return logits, weights.to(logits.dtype), experts


class TopKSoftmaxRouter(Layer):
    """Chooses experts by their logits, and weighs them by the softmax of the chosen ones, as Granite MoE does.

    Logits are compared before they are cast to float32, which does not change their order; the softmax of a narrower
    dtype is computed in float32 and rounded once.
    """

    def forward(self, hidden_states: Tensor) -> Routed:
        logits = F.linear(hidden_states, self.weight)
        chosen, experts = logits.topk(self.top_k, dim=-1)
        return logits.float(), chosen.softmax(dim=-1).type_as(hidden_states), experts


class TopKRouter(Layer):
    """Chooses experts by their logits, and weighs them as ``expert_selection_fn`` says, as Cohere 2 MoE does."""

    def forward(self, hidden_states: Tensor) -> Routed:
        if self.expert_selection_fn != "softmax":
            return type(self).forward(self, hidden_states)  # the original's: this is bound to an instance of it
        logits = F.linear(hidden_states, self.weight)
        chosen, experts = logits.topk(self.top_k, dim=-1)
        return logits, chosen.softmax(dim=-1).to(hidden_states.dtype), experts


class SigmoidScatterRouter(Layer):
    """Gives the sigmoid of the chosen logits among zeros, and all logits, as Llama 4 does."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden_states, self.weight, self.bias)
        chosen, experts = logits.topk(self.top_k, dim=1)
        return torch.zeros_like(logits).scatter_(1, experts, chosen.sigmoid()), logits


def _by_softmax(router: nn.Module, hidden_states: Tensor) -> Routed:
    """Compute the logits of a router, and the weights and indices of the experts that they choose."""
    logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
    return logits, *softmax_top_k(logits, router.top_k, getattr(router, "norm_topk_prob", True))


def _by_narrow_sigmoid(router: nn.Module, hidden_states: Tensor, bias: Tensor) -> Routed:
    """Compute logits in the dtype of the weight, and from them weights in float32."""
    x = hidden_states.reshape(-1, router.hidden_dim)
    logits = F.linear(x.to(router.weight.dtype), router.weight)
    return logits, *gating_top_k(logits.float(), router.top_k, bias, epsilon=0.0)


def _among_groups(router: nn.Module, logits: Tensor, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Choose experts by softmax among the groups with the best two."""
    return gating_top_k(
        logits,
        router.top_k,
        scores="softmax",
        groups=router.num_group,
        top_groups=router.topk_group,
        renormalise=renormalise,
        scale=router.routed_scaling_factor,
    )
