"""The mixtures of experts of transformers 4: each expert is a module of its own, and the gate is linear or a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.references.expert_lists_gated import DeepseekV2MoE, DeepseekV3MoE
from kernels_ext_npu.references.fingerprints import computes_as
from kernels_ext_npu.references.held import COMPUTED, held
from kernels_ext_npu.references.mlps import LlamaMLP, MixtralBlockSparseTop2MLP, Qwen2_5_VLMLP
from kernels_ext_npu.references.reference import Reference


class Qwen3MoeSparseMoeBlock(nn.Module):
    def __init__(self, hidden_size: int, num_experts: int, top_k: int, intermediate_size: int = 32) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.norm_topk_prob = True
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList([LlamaMLP(hidden_size, intermediate_size) for _ in range(num_experts)])

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        if self.norm_topk_prob:
            routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = torch.nn.functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return final_hidden_states, router_logits


class Qwen2MoeSparseMoeBlock(Qwen3MoeSparseMoeBlock):
    """The block with an expert that all tokens go to; Qwen3-Next's is the same."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, intermediate_size: int = 32) -> None:
        super().__init__(hidden_size, num_experts, top_k, intermediate_size)
        self.norm_topk_prob = False
        self.shared_expert = LlamaMLP(hidden_size, 2 * intermediate_size)
        self.shared_expert_gate = torch.nn.Linear(hidden_size, 1, bias=False)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        if self.norm_topk_prob:
            routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = torch.nn.functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        shared_expert_output = self.shared_expert(hidden_states)
        shared_expert_output = F.sigmoid(self.shared_expert_gate(hidden_states)) * shared_expert_output
        final_hidden_states = final_hidden_states + shared_expert_output
        final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return final_hidden_states, router_logits


class OlmoeSparseMoeBlock(Qwen3MoeSparseMoeBlock):
    """The block that runs through all experts; FlexOlmo's is the same."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        if self.norm_topk_prob:
            routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = torch.nn.functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        for expert_idx in range(self.num_experts):
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx])
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return final_hidden_states, router_logits


class MixtralSparseMoeBlock(nn.Module):
    """The block with noise in training; MiniMax's is the same."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, intermediate_size: int = 32) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList(
            [MixtralBlockSparseTop2MLP(hidden_size, intermediate_size) for _ in range(num_experts)]
        )
        self.jitter_noise = 0.0

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        batch_size, sequence_length, hidden_dim = hidden_states.shape
        if self.training and self.jitter_noise > 0:
            hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
        hidden_states = hidden_states.view(-1, hidden_dim)
        router_logits = self.gate(hidden_states)
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
        routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
        routing_weights = routing_weights.to(hidden_states.dtype)
        final_hidden_states = torch.zeros(
            (batch_size * sequence_length, hidden_dim), dtype=hidden_states.dtype, device=hidden_states.device
        )
        expert_mask = torch.nn.functional.one_hot(selected_experts, num_classes=self.num_experts).permute(2, 1, 0)
        expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()
        for expert_idx in expert_hit:
            expert_layer = self.experts[expert_idx]
            idx, top_x = torch.where(expert_mask[expert_idx].squeeze(0))
            current_state = hidden_states[None, top_x].reshape(-1, hidden_dim)
            current_hidden_states = expert_layer(current_state) * routing_weights[top_x, idx, None]
            final_hidden_states.index_add_(0, top_x, current_hidden_states.to(hidden_states.dtype))
        final_hidden_states = final_hidden_states.reshape(batch_size, sequence_length, hidden_dim)
        return final_hidden_states, router_logits


_EXPERTS = (LlamaMLP, Qwen2_5_VLMLP, MixtralBlockSparseTop2MLP)
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def _refuse(block: Any) -> str | None:
    """What changes later, and what only the weights show, the kernel sees in every forward, and the report says."""
    experts = list(block.experts)
    weight = held(block.gate, "weight")
    if weight is not COMPUTED and len(experts) != weight.shape[0]:
        return f"its gate chooses among {weight.shape[0]} experts, and it has {len(experts)}"
    for expert in experts:
        if not computes_as(type(expert), *_EXPERTS):
            return f"an expert is a {type(expert).__name__}, whose forward is not that of a gated MLP"
        for name in _PROJECTIONS:
            projection = getattr(expert, name, None)
            if projection is not None and type(projection) is not nn.Linear:
                kind = f"{type(projection).__module__}.{type(projection).__name__}"
                return f"a projection of an expert is a {kind}: one product of all experts needs plain weights"
    return None


def _refuse_parallel(block: DeepseekV2MoE) -> str | None:
    if block.ep_rank:
        return f"it has the experts of rank {block.ep_rank} only"
    return _refuse(block)


def _list(module: type[nn.Module], layer: str, refuse: Callable = _refuse) -> Reference:
    return Reference(module, (layer,), refuse, lambda block: None if refuse(block) else layer, sees_changes=True)


EXPERT_LISTS = (
    _list(Qwen3MoeSparseMoeBlock, "SparseMoEBlock"),
    _list(Qwen2MoeSparseMoeBlock, "SparseMoEBlock"),
    _list(OlmoeSparseMoeBlock, "SparseMoEBlock"),
    _list(MixtralSparseMoeBlock, "SparseMoEBlock"),
    _list(DeepseekV3MoE, "GatedMoEBlock"),
    _list(DeepseekV2MoE, "GatedMoEBlock", _refuse_parallel),
)
