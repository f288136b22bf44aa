"""The experts of transformers whose weights are one tensor for each projection.

transformers' ``use_experts_implementation`` gives every such class one forward, which calls an implementation by the
name in the model's config. What a class computes is said by the flags that the decorator sets on its instances, and by
its ``_apply_gate``; the decorator itself is the pattern (matching/fingerprint.py).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from transformers.integrations.moe import use_experts_implementation

from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.patterns.static_getattr import COMPUTED, static_getattr


@use_experts_implementation
class Experts(nn.Module):
    def forward(self, hidden_states, top_k_index, top_k_weights):
        final_hidden_states = torch.zeros_like(hidden_states)
        for expert_idx in range(self.num_experts):
            token_idx, top_k_pos = torch.where(top_k_index == expert_idx)
            current_state = hidden_states[token_idx]
            gate, up = F.linear(current_state, self.gate_up_proj[expert_idx]).chunk(2, dim=-1)
            current_hidden_states = F.linear(self.act_fn(gate) * up, self.down_proj[expert_idx])
            current_hidden_states = current_hidden_states * top_k_weights[token_idx, top_k_pos, None]
            final_hidden_states.index_add_(0, token_idx, current_hidden_states.to(final_hidden_states.dtype))
        return final_hidden_states


def _refuse(module: Any) -> str | None:
    first = "gate_up_proj" if module.has_gate else "up_proj"
    for name in (first, "down_proj"):
        weight = static_getattr(module, name)
        if weight is not COMPUTED and type(weight) not in (nn.Parameter, Tensor, FakeTensor, DTensor):
            return f"its {name} is a {type(weight).__name__}"
    return None


PATTERNS = (Pattern(Experts, ("MoEExperts",), _refuse),)
