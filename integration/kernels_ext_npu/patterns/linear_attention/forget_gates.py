"""The forget gates of Kimi delta attention: logarithms of decays, one for each channel of a key."""

from typing import Any

import torch
from torch import nn

from kernels_ext_npu.patterns.pattern import Pattern, require
from kernels_ext_npu.patterns.reworded import reworded


class KimiLinearForgetGate(nn.Module):
    def __init__(self, hidden_size: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.num_heads = head_dim, heads
        self.f_a_proj = nn.Linear(hidden_size, head_dim, bias=False)
        self.f_b_proj = nn.Linear(head_dim, heads * head_dim, bias=False)
        self.dt_bias = nn.Parameter(torch.zeros(heads * head_dim))
        self.A_log = nn.Parameter(torch.zeros(1, 1, heads, 1))

    def forward(self, hidden_states):
        hidden_shape = (*hidden_states.shape[:2], -1, self.head_dim)
        forget_gate = self.f_b_proj(self.f_a_proj(hidden_states))
        g = (forget_gate.float() + self.dt_bias.float().view(1, 1, -1)).view(hidden_shape)
        A_log = self.A_log.float()
        decay_rate = torch.exp(A_log)
        g_softplus = torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))
        return -decay_rate * g_softplus


# may bound its gates from below
Glm5NextTextForgetGate = reworded(
    "Glm5NextTextForgetGate",
    KimiLinearForgetGate,
    {
        "self.A_log.float()": "self.A_log.float().view(1, 1, self.num_heads, 1)",
        "    g_softplus =": """
    if self.safe_gate_lower_bound is not None:
        return self.safe_gate_lower_bound * torch.sigmoid(decay_rate * g)
    g_softplus =""",
    },
)


def _is_unbounded(module: Any) -> bool:
    return module.safe_gate_lower_bound is None


_UNBOUNDED = require(_is_unbounded, "it bounds its gates by {0.safe_gate_lower_bound}")
PATTERNS = (
    Pattern(KimiLinearForgetGate, ("ForgetGate",)),
    Pattern(Glm5NextTextForgetGate, ("ForgetGate",), _UNBOUNDED, holds=_is_unbounded),
)
