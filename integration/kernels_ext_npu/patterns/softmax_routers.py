"""The routers of transformers that choose the experts with the largest softmax, some of them with a correction."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from kernels_ext_npu.module_state import COMPUTED, static_getattr
from kernels_ext_npu.patterns.pattern import Part, Pattern, ignores, require, reworded
from kernels_ext_npu.patterns.sigmoid_routers import DeepseekV3TopkRouter, Router


class Qwen3MoeTopKRouter(Router):
    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states, self.weight)
        router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)
        router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
        if self.norm_topk_prob:
            router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
        router_top_value = router_top_value.to(router_logits.dtype)
        router_scores = router_top_value
        return router_logits, router_scores, router_indices


_ALWAYS_NORMALISED = {"    if self.norm_topk_prob:\n        router": "    router"}
_WEIGHTS_IN_FLOAT32 = {
    "(router_logits, dtype=torch.float, dim=-1)": "(router_logits.float(), dim=-1)",
    "    router_top_value = router_top_value.to(router_logits.dtype)\n": "",
}
Qwen3_5MoeTopKRouter = reworded("Qwen3_5MoeTopKRouter", Qwen3MoeTopKRouter, _ALWAYS_NORMALISED)
MixtralTopKRouter = reworded("MixtralTopKRouter", Qwen3_5MoeTopKRouter, _WEIGHTS_IN_FLOAT32)


class LaraMiniTopKRouter(Router):
    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.float(), self.weight.float())
        router_probs = F.softmax(router_logits, dim=-1)
        router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
        if self.norm_topk_prob:
            router_top_value = router_top_value / router_top_value.sum(dim=-1, keepdim=True)
        router_scores = router_top_value.to(hidden_states.dtype)
        return router_logits, router_scores, router_indices


class JambaTopKRouter(Router):
    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states, self.weight)
        routing_weights = torch.nn.functional.softmax(router_logits, dim=-1, dtype=torch.float)
        top_k_weights, top_k_index = torch.topk(routing_weights, self.top_k, dim=-1)
        return router_logits, top_k_weights.to(hidden_states.dtype), top_k_index


class HunYuanMoEV1Gate(Router):
    linear = "wg"

    def forward(self, hidden_states):
        hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
        if self.wg.weight.dtype == torch.float32:
            hidden_states = hidden_states.float()
        router_logits = self.wg(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        return router_logits, routing_weights.to(router_logits.dtype), selected_experts


class GraniteMoeTopKRouter(Router):
    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states, self.weight).float()
        top_k_logits, top_k_index = router_logits.topk(self.top_k, dim=-1)
        top_k_weights = torch.softmax(top_k_logits, dim=-1).type_as(hidden_states)
        return router_logits, top_k_weights, top_k_index


class Cohere2MoeTopKRouter(Router):
    expert_selection_fn = "softmax"

    def forward(self, hidden_states):
        router_logits = F.linear(hidden_states, self.weight)
        router_scores, selected_experts = torch.topk(router_logits, self.top_k, dim=-1)
        if self.expert_selection_fn == "softmax":
            router_scores = F.softmax(router_scores, dim=1, dtype=torch.float)
        elif self.expert_selection_fn == "sigmoid":
            router_scores = F.sigmoid(router_scores)
            if self.norm_topk_prob:
                router_scores = router_scores / torch.sum(router_scores, dim=-1, keepdims=True)
        else:
            raise ValueError("`expert_selection_fn` can only be `softmax` or `sigmoid`")
        router_scores = router_scores.to(hidden_states.dtype)
        return router_logits, router_scores, selected_experts


class Llama4Router(nn.Linear):
    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__(hidden_size, num_experts, bias=False)
        self.top_k = top_k

    def forward(self, hidden_states):
        router_logits = super().forward(hidden_states)
        router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=1)
        router_scores = torch.full_like(router_logits, float("-inf")).scatter_(1, router_indices, router_top_value)
        router_scores = torch.nn.functional.sigmoid(router_scores.float()).to(router_scores.dtype)
        return router_scores, router_logits


class Ernie4_5_MoeStatics(nn.Module):
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.e_score_correction_bias = nn.Parameter(torch.zeros(1, num_experts), requires_grad=False)

    def forward(self, hidden_states):
        return hidden_states + self.e_score_correction_bias.squeeze()


class Ernie4_5_MoeTopKRouter(Router):
    norm_min = 1e-12

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__(hidden_size, num_experts, top_k)
        self.moe_statics = Ernie4_5_MoeStatics(num_experts)

    def forward(self, hidden_states):
        device_type = hidden_states.device.type if isinstance(hidden_states.device.type, str) else "cpu"
        with maybe_autocast(device_type=device_type, enabled=False):
            router_logits = F.linear(hidden_states.float(), self.weight.float())
            routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
            _, selected_experts = torch.topk(self.moe_statics(routing_weights), self.top_k, dim=-1)
            routing_weights = torch.gather(routing_weights, dim=-1, index=selected_experts)
            routing_weights = routing_weights / torch.clamp(
                routing_weights.sum(dim=-1, keepdim=True), min=self.norm_min
            )
        routing_weights = routing_weights.to(hidden_states.dtype)
        return router_logits, routing_weights, selected_experts


class LongcatFlashTopkRouter(Router):
    linear = "classifier"

    def forward(self, hidden_states):
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.type(torch.float32), self.classifier.weight.type(torch.float32))
        scores = router_logits.softmax(dim=-1)
        topk_indices = self.get_topk_indices(scores)
        topk_weights = scores.gather(1, topk_indices)
        topk_weights = topk_weights * self.routed_scaling_factor
        return router_logits, topk_weights.to(router_logits.dtype), topk_indices

    @torch.no_grad()
    def get_topk_indices(self, scores):
        scores_for_choice = scores.view(-1, self.n_routed_experts) + self.e_score_correction_bias.unsqueeze(0)
        return torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]


# chooses groups first, which are compared by their two best experts
_GROUPED = {
    "hidden_states.type(torch.float32), self.weight.type(torch.float32)": "hidden_states, self.weight",
    "router_logits.sigmoid()": "router_logits.softmax(-1)",
    "    scores_for_choice = scores + self.e_score_correction_bias\n": "",
    "        scores_for_choice.view": "        scores.view",
    "scores_for_choice.masked_fill": "scores.masked_fill",
    'float("-inf")': "0.0",
}
# the same in float32, which always divides by the sum
_GROUPED_IN_FLOAT32 = {
    "hidden_states, self.weight)": "hidden_states.float(), self.weight.float())",
    "    if self.norm_topk_prob:\n        denominator": "    denominator",
    "        topk_weights /=": "    topk_weights /=",
}
Mistral4TopkRouter = reworded("Mistral4TopkRouter", DeepseekV3TopkRouter, _GROUPED)
MistralLarge4TextTopkRouter = reworded("MistralLarge4TextTopkRouter", Mistral4TopkRouter, _GROUPED_IN_FLOAT32)


class DeepseekV2TopkRouter(Router):
    """The router that chooses groups first, which it compares by their best expert."""

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
_BY_SOFTMAX = require(
    lambda router: router.expert_selection_fn == "softmax",
    "its expert_selection_fn is {0.expert_selection_fn}, the kernel has softmax",
)
# the tree says super().forward, and not of what
_LINEAR = require(lambda router: type(router).__bases__ == (nn.Linear,), "its product is not that of a linear layer")
_STATICS = Part("moe_statics", (Ernie4_5_MoeStatics,), "its moe_statics is a {}")

_NORMALISED = ignores(norm_topk_prob=True)

PATTERNS = (
    Pattern(Qwen3MoeTopKRouter, ("SoftmaxTopKRouter",)),
    Pattern(Qwen3_5MoeTopKRouter, ("SoftmaxTopKRouter",), _NORMALISED),
    Pattern(MixtralTopKRouter, ("SoftmaxTopKRouterFloat32",), _NORMALISED),
    Pattern(LaraMiniTopKRouter, ("SoftmaxTopKRouterInFloat32",)),
    Pattern(JambaTopKRouter, ("SoftmaxTopKRouterUnnormalised",)),
    Pattern(HunYuanMoEV1Gate, ("SoftmaxTopKRouterLinear",)),
    Pattern(GraniteMoeTopKRouter, ("TopKSoftmaxRouter",)),
    Pattern(Cohere2MoeTopKRouter, ("TopKRouter",), _BY_SOFTMAX, rechecks_every_call=True),
    Pattern(Llama4Router, ("SigmoidScatterRouter",), _LINEAR),
    Pattern(LongcatFlashTopkRouter, ("BiasedSoftmaxTopKRouter",)),
    Pattern(Ernie4_5_MoeTopKRouter, ("CorrectedSoftmaxTopKRouter",), parts=(_STATICS,)),
    Pattern(MistralLarge4TextTopkRouter, ("GroupedSoftmaxTopKRouterNormalised",)),
    Pattern(DeepseekV2TopkRouter, ("GroupedSoftmaxTopKRouter",), _GREEDY, rechecks_every_call=True),
    Pattern(Mistral4TopkRouter, ("GroupedSoftmaxTopKRouterNarrow",), _WIDE, rechecks_every_call=True),
)
