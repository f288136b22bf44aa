"""The routers of transformers that choose experts by softmax, among groups of them or with a correction."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.utils.generic import maybe_autocast

from kernels_ext_npu.references.fingerprints import computes_as
from kernels_ext_npu.references.held import COMPUTED, held
from kernels_ext_npu.references.hooks import has_hooks
from kernels_ext_npu.references.reference import always, unless


class DeepseekV2TopkRouter(nn.Module):
    def __init__(self, hidden_size: int, num_experts: int, top_k: int, n_group: int = 1, topk_group: int = 1) -> None:
        super().__init__()
        self.top_k = top_k
        self.num_experts = num_experts
        self.hidden_dim = hidden_size
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.routed_scaling_factor = 1.0
        self.topk_method = "group_limited_greedy"
        self.num_group = n_group
        self.topk_group = topk_group

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


class Mistral4TopkRouter(DeepseekV2TopkRouter):
    def __init__(self, hidden_size: int, num_experts: int, top_k: int, n_group: int = 1, topk_group: int = 1) -> None:
        super().__init__(hidden_size, num_experts, top_k, n_group, topk_group)
        self.norm_topk_prob = True

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states, self.weight)
        scores = router_logits.softmax(-1)
        group_scores = (
            scores.view(-1, self.num_group, self.num_experts // self.num_group).topk(2, dim=-1)[0].sum(dim=-1)
        )
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores)
        group_mask.scatter_(1, group_idx, 1)
        score_mask = (
            group_mask.unsqueeze(-1)
            .expand(-1, self.num_group, self.num_experts // self.num_group)
            .reshape(-1, self.num_experts)
        )
        scores_for_choice = scores.masked_fill(~score_mask.bool(), 0.0)
        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
        topk_weights = scores.gather(1, topk_indices)
        if self.norm_topk_prob:
            denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
            topk_weights /= denominator
        topk_weights = topk_weights * self.routed_scaling_factor
        return router_logits, topk_weights, topk_indices


class MistralLarge4TextTopkRouter(DeepseekV2TopkRouter):
    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.float(), self.weight.float())
        scores = router_logits.softmax(-1)
        group_scores = (
            scores.view(-1, self.num_group, self.num_experts // self.num_group).topk(2, dim=-1)[0].sum(dim=-1)
        )
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores)
        group_mask.scatter_(1, group_idx, 1)
        score_mask = (
            group_mask.unsqueeze(-1)
            .expand(-1, self.num_group, self.num_experts // self.num_group)
            .reshape(-1, self.num_experts)
        )
        scores_for_choice = scores.masked_fill(~score_mask.bool(), 0.0)
        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
        topk_weights = scores.gather(1, topk_indices)
        denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
        topk_weights /= denominator
        topk_weights = topk_weights * self.routed_scaling_factor
        return router_logits, topk_weights, topk_indices


class Ernie4_5_MoeStatics(nn.Module):  # noqa: N801  as transformers writes it
    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.e_score_correction_bias = nn.Parameter(torch.zeros(1, num_experts), requires_grad=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states + self.e_score_correction_bias.squeeze()


class Ernie4_5_MoeTopKRouter(nn.Module):  # noqa: N801  as transformers writes it
    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.moe_statics = Ernie4_5_MoeStatics(num_experts)
        self.top_k = top_k
        self.norm_min = 1e-12

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
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


class LongcatFlashTopkRouter(nn.Module):
    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.hidden_dim = hidden_size
        self.n_routed_experts = num_experts
        self.routed_scaling_factor = 1.0
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))
        self.classifier = nn.Linear(hidden_size, num_experts, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden_states = hidden_states.view(-1, self.hidden_dim)
        router_logits = F.linear(hidden_states.type(torch.float32), self.classifier.weight.type(torch.float32))
        scores = router_logits.softmax(dim=-1)
        topk_indices = self.get_topk_indices(scores)
        topk_weights = scores.gather(1, topk_indices)
        topk_weights = topk_weights * self.routed_scaling_factor
        return router_logits, topk_weights.to(router_logits.dtype), topk_indices

    @torch.no_grad()
    def get_topk_indices(self, scores: Tensor) -> Tensor:
        scores_for_choice = scores.view(-1, self.n_routed_experts) + self.e_score_correction_bias.unsqueeze(0)
        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
        return topk_indices  # noqa: RET504  as transformers writes it


def _refuse_method(router: nn.Module) -> str | None:
    if router.topk_method in ("greedy", "group_limited_greedy"):
        return None
    return f"its topk_method is {router.topk_method}, the kernel has greedy and group_limited_greedy"


def _refuse_narrow(router: nn.Module) -> str | None:
    weight = held(router, "weight")
    if weight is COMPUTED or weight.dtype is torch.float32:
        return None
    return f"it compares probabilities that are rounded to {weight.dtype}, and the operator compares them in float32"


def _refuse_statics(router: nn.Module) -> str | None:
    if not computes_as(type(router.moe_statics), Ernie4_5_MoeStatics):
        return f"its moe_statics is a {type(router.moe_statics).__name__}"
    if has_hooks(router.moe_statics):
        return "hooks watch its moe_statics, which the kernel does not call"
    return None


GROUPED_SOFTMAX_ROUTERS = (
    always(MistralLarge4TextTopkRouter, "GroupedSoftmaxTopKRouterNormalised"),
    always(LongcatFlashTopkRouter, "BiasedSoftmaxTopKRouter"),
    unless(DeepseekV2TopkRouter, "GroupedSoftmaxTopKRouter", _refuse_method, sees_changes=True),
    unless(Mistral4TopkRouter, "GroupedSoftmaxTopKRouterNarrow", _refuse_narrow, sees_changes=True),
    unless(Ernie4_5_MoeTopKRouter, "CorrectedSoftmaxTopKRouter", _refuse_statics),
)
