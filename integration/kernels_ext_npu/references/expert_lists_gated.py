"""The mixtures of experts of transformers 4 with a list of experts and a gate that is a module: DeepSeek's."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.references.mlps import LlamaMLP


class TopkRouter(nn.Module):
    """The gate of DeepSeek-V3 with one group. A block may have another gate: what that does is its own."""

    e_score_correction_bias: Tensor

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(num_experts, hidden_size) * hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
        scores = router_logits.sigmoid()
        scores_for_choice = scores + self.e_score_correction_bias.unsqueeze(0)
        topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
        topk_weights = scores.gather(1, topk_indices)
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_indices, topk_weights * 2.5


class DeepseekV3MoE(nn.Module):
    """The block of DeepSeek-V3; those of GLM-4-MoE, GLM-4V-MoE and Dots are the same."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, intermediate_size: int = 32) -> None:
        super().__init__()
        self.experts = nn.ModuleList([LlamaMLP(hidden_size, intermediate_size) for _ in range(num_experts)])
        self.gate = TopkRouter(hidden_size, num_experts, top_k)
        self.shared_experts = LlamaMLP(hidden_size, 2 * intermediate_size)

    def moe(self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
        final_hidden_states = torch.zeros_like(hidden_states, dtype=topk_weights.dtype)
        expert_mask = torch.nn.functional.one_hot(topk_indices, num_classes=len(self.experts))
        expert_mask = expert_mask.permute(2, 0, 1)
        for expert_idx in range(len(self.experts)):
            expert = self.experts[expert_idx]
            mask = expert_mask[expert_idx]
            token_indices, weight_indices = torch.where(mask)
            if token_indices.numel() > 0:
                expert_weights = topk_weights[token_indices, weight_indices]
                expert_input = hidden_states[token_indices]
                expert_output = expert(expert_input)
                weighted_output = expert_output * expert_weights.unsqueeze(-1)
                final_hidden_states.index_add_(0, token_indices, weighted_output)
        return final_hidden_states.type(hidden_states.dtype)

    def forward(self, hidden_states: Tensor) -> Tensor:
        residuals = hidden_states
        orig_shape = hidden_states.shape
        topk_indices, topk_weights = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        hidden_states = self.moe(hidden_states, topk_indices, topk_weights).view(*orig_shape)
        hidden_states = hidden_states + self.shared_experts(residuals)
        return hidden_states  # noqa: RET504  as transformers writes it


class DeepseekV2MoE(DeepseekV3MoE):
    def __init__(self, hidden_size: int, num_experts: int, top_k: int, intermediate_size: int = 32) -> None:
        super().__init__(hidden_size, num_experts, top_k, intermediate_size)
        self.ep_rank = 0
        self.experts_per_rank = num_experts

    def moe(self, hidden_states: Tensor, topk_ids: Tensor, topk_weight: Tensor) -> Tensor:  # type: ignore[override]
        cnts = topk_ids.new_zeros((topk_ids.shape[0], len(self.experts)))
        cnts.scatter_(1, topk_ids, 1)
        tokens_per_expert = cnts.sum(dim=0)
        indices = topk_ids.view(-1).argsort()
        sorted_tokens = hidden_states[indices // topk_ids.shape[1]]
        outputs = []
        start_idx = 0
        for i, num_tokens in enumerate(tokens_per_expert):
            if num_tokens == 0:
                continue
            end_idx = start_idx + num_tokens
            expert = self.experts[i + self.ep_rank * self.experts_per_rank]
            tokens_for_this_expert = sorted_tokens[start_idx:end_idx]
            expert_out = expert(tokens_for_this_expert)
            outputs.append(expert_out)
            start_idx = end_idx
        outs = torch.cat(outputs, dim=0) if outputs else sorted_tokens.new_empty(0)
        new_x = torch.empty_like(outs)
        new_x[indices] = outs
        hidden_states = (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )
        return hidden_states  # noqa: RET504  as transformers writes it
