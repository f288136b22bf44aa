"""The experts of transformers whose weights are one tensor for each projection.

transformers' ``use_experts_implementation`` gives every such class one forward, which calls an implementation by the
name in the model's config. What a class computes is said by the flags that the decorator sets on its instances, and by
its ``_apply_gate``; the decorator itself is the pattern (fingerprints.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.integrations.moe import use_experts_implementation

from kernels_ext_npu.references.held import COMPUTED, held
from kernels_ext_npu.references.reference import Reference


@use_experts_implementation
class Experts(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        sizes = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(sizes[0], 2 * sizes[2], sizes[1]))
        self.down_proj = nn.Parameter(torch.empty(*sizes))
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        final_hidden_states = torch.zeros_like(hidden_states)
        for expert_idx in range(self.num_experts):
            token_idx, top_k_pos = torch.where(top_k_index == expert_idx)
            current_state = hidden_states[token_idx]
            gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current_hidden_states = F.linear(self.act_fn(gate) * up, self.down_proj[expert_idx])
            current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
            final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))
        return final_hidden_states


def _refuse(module: nn.Module) -> str | None:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for name in (first, "down_proj"):
        weight = held(module, name)
        if weight is not COMPUTED and type(weight) not in (nn.Parameter, Tensor, FakeTensor, DTensor):
            return f"its {name} is a {type(weight).__name__}"
    return None


EXPERTS = Reference(Experts, ("MoEExperts",), _refuse, lambda _: "MoEExperts")
