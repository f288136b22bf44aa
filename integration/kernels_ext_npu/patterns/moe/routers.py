"""What the routers of transformers hold."""

import torch
from torch import nn


class Router(nn.Module):
    """The members of routers, of which each reads some; what only few have is beside their forward."""

    norm_topk_prob = True
    routed_scaling_factor = 1.0
    num_group, topk_group = 1, 1

    def __init__(self, hidden_size: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.hidden_dim, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.weight = nn.Parameter(torch.zeros(num_experts, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts))
