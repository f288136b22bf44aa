"""The routers of transformers that choose experts by the sigmoid of their logits, and what routers have in common."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.utils.generic import maybe_autocast

from kernels_ext_npu.patterns.pattern import Part, Pattern, ignores, require, reworded


class Router(nn.Module):
    """The members of routers, of which each reads some; what only few have is beside their forward."""

    norm_topk_prob = True
    routed_scaling_factor = 1.0
    num_group, topk_group = 1, 1

    linear: str | None = None  # what computes logits where that is a module

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.hidden_dim, self.num_experts, self.n_routed_experts = hidden_size, num_experts, num_experts
        self.top_k = top_k
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))
        if self.linear is None:
            self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))
        else:
            setattr(self, self.linear, nn.Linear(hidden_size, num_experts, bias=False))


class DeepseekV3TopkRouter(Router):
    """The router that chooses groups of experts first, and experts among those of the chosen groups."""

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
        scores = router_logits.sigmoid()
        scores_for_choice = scores + self.e_score_correction_bias
        group_scores = (
            scores_for_choice.view(-1, self.num_group, self.num_experts // self.num_group)
            .topk(2, dim=-1)[0]
            .sum(dim=-1)
        )
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores)
        group_mask.scatter_(1, group_idx, 1)
        score_mask = (
            group_mask.unsqueeze(-1)
            .expand(-1, self.num_group, self.num_experts // self.num_group)
            .reshape(-1, self.num_experts)
        )
        scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float("-inf"))
        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
        topk_weights = scores.gather(1, topk_indices)
        if self.norm_topk_prob:
            denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
            topk_weights /= denominator
        topk_weights = topk_weights * self.routed_scaling_factor
        return router_logits, topk_weights, topk_indices


# Beam's router, whose scale is applied to the output of the experts
_WITHOUT_SCALE = {
    ".type(torch.float32)": ".float()",
    ", sorted=False": "",
    "        denominator = topk_weights": "        topk_weights /= topk_weights",
    "        topk_weights /= denominator\n": "",
    "    topk_weights = topk_weights * self.routed_scaling_factor\n": "",
}
BeamTopKRouter = reworded("BeamTopKRouter", DeepseekV3TopkRouter, _WITHOUT_SCALE)


class AXK2TopkRouter(Router):
    """The router that fills groups which are not chosen with 0, which an expert with a negative bias falls below.

    The kernel serves it without groups.
    """

    num_group: Any = None

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
        scores = router_logits.sigmoid()
        scores_for_choice = scores + self.e_score_correction_bias
        if self.num_group is not None:
            scores_for_choice = self.apply_group_scoring(scores_for_choice)
        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
        topk_weights = scores.gather(1, topk_indices)
        if self.norm_topk_prob:
            denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
            topk_weights /= denominator
        topk_weights = topk_weights * self.routed_scaling_factor
        return router_logits, topk_weights, topk_indices


class MiniMaxM3VLTopKRouter(Router):
    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.to(self.weight.dtype), self.weight)
        routing_weights = F.sigmoid(router_logits.float())
        scores_for_choice = routing_weights + self.e_score_correction_bias
        _, top_k_index = torch.topk(scores_for_choice, self.top_k, dim=-1, sorted=False)
        top_k_weights = routing_weights.gather(1, top_k_index)
        top_k_weights /= top_k_weights.sum(dim=-1, keepdim=True)
        return router_logits, top_k_weights, top_k_index


_GIVEN_BIAS = {
    "self, hidden_states)": "self, hidden_states, e_score_correction_bias)",
    "self.e_score_correction_bias": "e_score_correction_bias",
}
_IN_FLOAT32 = {
    "hidden_states.to(self.weight.dtype), self.weight": "hidden_states.float(), self.weight.float()",
    "F.sigmoid(router_logits.float())": "torch.sigmoid(router_logits)",
    "    top_k_weights /= top_k_weights.sum(dim=-1, keepdim=True)\n": """
    top_k_weights = top_k_weights / (top_k_weights.sum(dim=-1, keepdim=True) + 1e-20)
    top_k_weights = top_k_weights * self.router_scaling_factor
""",
}
_OTHER_WORDS = {
    "F.sigmoid": "nn.functional.sigmoid",
    "    return router_logits, top_k_weights": """    router_scores = top_k_weights
    return router_logits, router_scores""",
}
MiniMaxM2TopKRouter = reworded("MiniMaxM2TopKRouter", MiniMaxM3VLTopKRouter, _GIVEN_BIAS | _OTHER_WORDS)
HYV3TopKRouter = reworded("HYV3TopKRouter", MiniMaxM3VLTopKRouter, _GIVEN_BIAS | _IN_FLOAT32)
HYV3TopKRouter.router_scaling_factor = 1.0


class FlintTopKRouter(Router):
    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        device_type = hidden_states.device.type if isinstance(hidden_states.device.type, str) else "cpu"
        with maybe_autocast(device_type=device_type, enabled=False):
            router_logits = F.linear(hidden_states.float(), self.weight.float())
        routing_weights, selected_experts = torch.topk(router_logits.sigmoid(), self.top_k, dim=-1)
        if self.norm_topk_prob:
            routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
        return router_logits, routing_weights, selected_experts


class AfmoeTokenChoiceRouter(Router):
    linear, route_scale = "gate", 1.0

    def forward(self, hidden_states, expert_bias):
        _, _, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states).to(torch.float32)
        scores = torch.sigmoid(router_logits)
        _, selected_experts = torch.topk(scores + expert_bias, k=self.top_k, dim=1)
        top_scores = scores.gather(dim=1, index=selected_experts)
        denominator = top_scores.sum(dim=-1, keepdim=True) + 1e-20
        top_scores = top_scores / denominator
        top_scores = top_scores * self.route_scale
        return router_logits, top_scores, selected_experts


class LagunaTopKRouter(Router):
    router_logit_softcapping = 0.0

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states, self.weight).float()
        if self.router_logit_softcapping > 0.0:
            router_logits = torch.tanh(router_logits / self.router_logit_softcapping) * self.router_logit_softcapping
        routing_scores = torch.sigmoid(router_logits)
        scores_for_selection = routing_scores + self.e_score_correction_bias.to(routing_scores.dtype)
        _, selected_experts = torch.topk(scores_for_selection, self.top_k, dim=-1)
        routing_weights = routing_scores.gather(-1, selected_experts)
        routing_weights = routing_weights / routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        return router_logits, routing_weights, selected_experts


class MuseSparkTopkRouter(Router):
    output_multiplier, norm_topk_prob_eps = 1.0, 1e-15
    scoring_function = ACT2FN["sigmoid"]

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
        router_logits = router_logits * self.output_multiplier
        routing_weights = self.scoring_function(router_logits)
        scores_for_choice = routing_weights + self.e_score_correction_bias
        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
        top_k_weights = routing_weights.gather(1, topk_indices)
        top_k_weights = top_k_weights / (top_k_weights.sum(dim=-1, keepdim=True) + self.norm_topk_prob_eps)
        top_k_weights = top_k_weights * self.routed_scaling_factor
        return router_logits, top_k_weights, topk_indices


class Inkling2TopKRouter(Router):
    score_fn = ACT2FN["sigmoid"]

    def forward(self, hidden_states):
        hidden_states = hidden_states.float()
        flat = hidden_states.reshape(-1, self.hidden_dim)
        logits = F.linear(flat, self.weight)
        scores = self.score_fn(logits)
        indices = torch.topk(scores + self.e_score_correction_bias, self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, indices)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * self.routed_scaling_factor, indices


_UNGROUPED = require(
    lambda router: router.num_group is None,
    "it fills groups that are not chosen with 0, and the operator leaves them out: a negative bias tells",
)
_SCORING = Part("scoring_function", (nn.Sigmoid,), "it scores with {}, the kernel with a sigmoid")
_SCORES = replace(_SCORING, name="score_fn")

PATTERNS = (
    Pattern(DeepseekV3TopkRouter, ("SigmoidTopKRouter",)),
    Pattern(BeamTopKRouter, ("SigmoidTopKRouter",), ignores(routed_scaling_factor=1.0)),
    Pattern(HYV3TopKRouter, ("SigmoidTopKRouterGivenBias",)),
    Pattern(MiniMaxM3VLTopKRouter, ("SigmoidTopKRouterNarrow",)),
    Pattern(MiniMaxM2TopKRouter, ("SigmoidTopKRouterNarrowGivenBias",)),
    Pattern(FlintTopKRouter, ("SigmoidTopKRouterUnbiased",)),
    Pattern(AfmoeTokenChoiceRouter, ("SigmoidTopKRouterLinear",)),
    Pattern(LagunaTopKRouter, ("SigmoidTopKRouterSoftcapped",)),
    Pattern(AXK2TopkRouter, ("SigmoidTopKRouterUngrouped",), _UNGROUPED, rechecks_every_call=True),
    Pattern(MuseSparkTopkRouter, ("SigmoidTopKRouterMultiplied",), parts=(_SCORING,), rechecks_every_call=True),
    Pattern(Inkling2TopKRouter, ("SigmoidTopKRouterNormalised",), parts=(_SCORES,), rechecks_every_call=True),
)
