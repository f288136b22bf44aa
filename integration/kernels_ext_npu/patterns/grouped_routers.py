"""The routers of transformers that choose groups of experts first, and experts among those of the chosen groups."""

import torch
from torch.nn import functional as F

from kernels_ext_npu.module_state import COMPUTED, static_getattr
from kernels_ext_npu.patterns.pattern import Pattern, ignores, require, reworded
from kernels_ext_npu.patterns.softmax_routers import Router


class DeepseekV3TopkRouter(Router):
    """The router by the sigmoid of logits."""

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
# by the softmax of logits; groups are compared by their two best experts
_SOFTMAX = {
    "hidden_states.type(torch.float32), self.weight.type(torch.float32)": "hidden_states, self.weight",
    "router_logits.sigmoid()": "router_logits.softmax(-1)",
    "    scores_for_choice = scores + self.e_score_correction_bias\n": "",
    "        scores_for_choice.view": "        scores.view",
    "scores_for_choice.masked_fill": "scores.masked_fill",
    'float("-inf")': "0.0",
}
# the same in float32, which always divides by the sum
_IN_FLOAT32 = {
    "hidden_states, self.weight)": "hidden_states.float(), self.weight.float())",
    "    if self.norm_topk_prob:\n        denominator": "    denominator",
    "        topk_weights /=": "    topk_weights /=",
}
BeamTopKRouter = reworded("BeamTopKRouter", DeepseekV3TopkRouter, _WITHOUT_SCALE)
Mistral4TopkRouter = reworded("Mistral4TopkRouter", DeepseekV3TopkRouter, _SOFTMAX)
MistralLarge4TextTopkRouter = reworded("MistralLarge4TextTopkRouter", Mistral4TopkRouter, _IN_FLOAT32)


class DeepseekV2TopkRouter(Router):
    """The router by the softmax of logits, which compares groups by their best expert."""

    topk_method = "group_limited_greedy"

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
        scores = router_logits.softmax(dim=-1, dtype=torch.float32)
        if self.topk_method == "greedy":
            topk_weights, topk_indices = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        elif self.topk_method == "group_limited_greedy":
            group_scores = scores.view(-1, self.num_group, self.num_experts // self.num_group).max(dim=-1).values
            group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
            group_mask = torch.zeros_like(group_scores)
            group_mask.scatter_(1, group_idx, 1)
            score_mask = (
                group_mask.unsqueeze(-1)
                .expand(-1, self.num_group, self.num_experts // self.num_group)
                .reshape(-1, self.num_experts)
            )
            scores = scores.masked_fill(~score_mask.bool(), 0.0)
            topk_weights, topk_indices = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        topk_weights = topk_weights * self.routed_scaling_factor
        return router_logits, topk_weights, topk_indices


_GREEDY = require(
    lambda router: router.topk_method in ("greedy", "group_limited_greedy"),
    "its topk_method is {0.topk_method}, the kernel has greedy and group_limited_greedy",
)
_WIDE = require(
    lambda router: (weight := static_getattr(router, "weight")) is COMPUTED or weight.dtype is torch.float32,
    "it compares probabilities that are rounded to {0.weight.dtype}, and the operator compares them in float32",
)
PATTERNS = (
    Pattern(DeepseekV3TopkRouter, ("SigmoidTopKRouter",)),
    Pattern(BeamTopKRouter, ("SigmoidTopKRouter",), ignores(routed_scaling_factor=1.0)),
    Pattern(MistralLarge4TextTopkRouter, ("GroupedSoftmaxTopKRouterNormalised",)),
    Pattern(DeepseekV2TopkRouter, ("GroupedSoftmaxTopKRouter",), _GREEDY, rechecks_every_call=True),
    Pattern(Mistral4TopkRouter, ("GroupedSoftmaxTopKRouterNarrow",), _WIDE, rechecks_every_call=True),
)
