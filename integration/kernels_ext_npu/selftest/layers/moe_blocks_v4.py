"""The mixtures of experts of transformers 4, as it has them: no release that is supported has them any more."""

from __future__ import annotations

import inspect
import linecache
import sys
import textwrap
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP

from kernels_ext_npu.selftest.layers.bare_modules import mlp
from kernels_ext_npu.selftest.layers.other_releases import MixtralBlockSparseTop2MLP


def reworded(name: str, base: type[nn.Module], changes: dict[str, str]) -> Any:
    """Return a subclass with a copy of its forward whose source has some words replaced, wherever they stand.

    It belongs to the module of the original. inspect, tracebacks and torch.compile find its source.

    Example:
        >>> summed = reworded("Summed", LlamaRMSNorm, {"mean": "sum"})

    Raises:
        ValueError: the words are not in the source, or the name is taken.
    """
    source = textwrap.dedent(inspect.getsource(base.forward))
    for old, new in changes.items():
        if old not in source:
            raise ValueError(f"{base.__name__} has no {old!r}")
        source = source.replace(old, new)
    file = f"<{base.__module__}.{name}>"
    if file in linecache.cache:
        raise ValueError(f"there is a {file} already, whose source would be read in place of this one")
    linecache.cache[file] = len(source), None, source.splitlines(True), file
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), vars(sys.modules[base.__module__]), made)
    return type(name, (base,), {**made, "__module__": base.__module__})


def _expert(cls: type[nn.Module] | None, hidden_size: int, intermediate_size: int) -> Any:
    return mlp(cls or LlamaMLP, hidden_size, intermediate_size)


class Qwen3MoeSparseMoeBlock(nn.Module):
    norm_topk_prob, jitter_noise = True, 0.0
    expert: type[nn.Module] | None = None

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, intermediate_size: int = 32) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList([_expert(self.expert, hidden_size, intermediate_size) for _ in range(num_experts)])
        if "shared_expert" in type(self).forward.__code__.co_names:
            self.shared_expert = _expert(None, hidden_size, 2 * intermediate_size)
            self.shared_expert_gate = torch.nn.Linear(hidden_size, 1, bias=False)

    def forward(self, hidden_states):
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


# with an expert that all tokens go to; Qwen3-Next's is the same
_SHARED = {
    "    final_hidden_states = final_hidden_states.reshape": """
    shared_expert_output = self.shared_expert(hidden_states)
    shared_expert_output = F.sigmoid(self.shared_expert_gate(hidden_states)) * shared_expert_output
    final_hidden_states = final_hidden_states + shared_expert_output
    final_hidden_states = final_hidden_states.reshape"""
}
# runs through all experts; FlexOlmo's is the same
_ALL_EXPERTS = {
    "    expert_hit = torch.greater(expert_mask.sum(dim=(-1, -2)), 0).nonzero()\n": "",
    "in expert_hit": "in range(self.num_experts)",
    ".squeeze(0)": "",
}
# with noise in training; MiniMax's is the same
_NOISE = {
    "    hidden_states = hidden_states.view": """
    if self.training and self.jitter_noise > 0:
        hidden_states *= torch.empty_like(hidden_states).uniform_(1.0 - self.jitter_noise, 1.0 + self.jitter_noise)
    hidden_states = hidden_states.view""",
    "    if self.norm_topk_prob:\n        routing": "    routing",
}
Qwen2MoeSparseMoeBlock = reworded("Qwen2MoeSparseMoeBlock", Qwen3MoeSparseMoeBlock, _SHARED)
Qwen2MoeSparseMoeBlock.norm_topk_prob = False
OlmoeSparseMoeBlock = reworded("OlmoeSparseMoeBlock", Qwen3MoeSparseMoeBlock, _ALL_EXPERTS)
MixtralSparseMoeBlock = reworded("MixtralSparseMoeBlock", Qwen3MoeSparseMoeBlock, _NOISE)
MixtralSparseMoeBlock.expert = MixtralBlockSparseTop2MLP


class Gate(nn.Module):
    """A gate by the sigmoid of logits. A block may have another one: what that does is its own."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.randn(num_experts, hidden_size) * hidden_size**-0.5)

    def forward(self, hidden_states):
        scores = F.linear(hidden_states.flatten(0, -2).float(), self.weight.float()).sigmoid()
        topk_weights, topk_indices = scores.topk(self.top_k, dim=-1, sorted=False)
        topk_weights = topk_weights / (topk_weights.sum(dim=-1, keepdim=True) + 1e-20)
        return topk_indices, topk_weights * 2.5


class DeepseekV3MoE(nn.Module):
    """The block whose gate is a module; those of GLM-4-MoE, GLM-4V-MoE and Dots are the same."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, intermediate_size: int = 32) -> None:
        super().__init__()
        self.experts = nn.ModuleList([_expert(None, hidden_size, intermediate_size) for _ in range(num_experts)])
        self.gate = Gate(hidden_size, num_experts, top_k)
        self.shared_experts = _expert(None, hidden_size, 2 * intermediate_size)

    def moe(self, hidden_states, topk_indices, topk_weights):
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

    def forward(self, hidden_states):
        residuals = hidden_states
        orig_shape = hidden_states.shape
        topk_indices, topk_weights = self.gate(hidden_states)
        hidden_states = hidden_states.view(-1, hidden_states.shape[-1])
        hidden_states = self.moe(hidden_states, topk_indices, topk_weights).view(*orig_shape)
        return hidden_states + self.shared_experts(residuals)


class DeepseekV2MoE(DeepseekV3MoE):
    ep_rank, experts_per_rank = 0, 0

    def moe(self, hidden_states, topk_ids, topk_weight):
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
        return (
            new_x.view(*topk_ids.shape, -1)
            .type(topk_weight.dtype)
            .mul_(topk_weight.unsqueeze(dim=-1))
            .sum(dim=1)
            .type(new_x.dtype)
        )


# block -> the layer that serves it
BLOCKS: dict[type[nn.Module], str] = dict.fromkeys(
    (Qwen3MoeSparseMoeBlock, OlmoeSparseMoeBlock, Qwen2MoeSparseMoeBlock, MixtralSparseMoeBlock), "SparseMoEBlock"
) | dict.fromkeys((DeepseekV3MoE, DeepseekV2MoE), "GatedMoEBlock")
