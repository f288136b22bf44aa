"""Makes small blocks with a list of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels_ext_npu.references.expert_lists import (
    MixtralSparseMoeBlock,
    OlmoeSparseMoeBlock,
    Qwen2MoeSparseMoeBlock,
    Qwen3MoeSparseMoeBlock,
)
from kernels_ext_npu.references.expert_lists_gated import DeepseekV2MoE, DeepseekV3MoE

BLOCKS = {
    Qwen3MoeSparseMoeBlock: "SparseMoEBlock",
    Qwen2MoeSparseMoeBlock: "SparseMoEBlock",
    OlmoeSparseMoeBlock: "SparseMoEBlock",
    MixtralSparseMoeBlock: "SparseMoEBlock",
    DeepseekV3MoE: "GatedMoEBlock",
    DeepseekV2MoE: "GatedMoEBlock",
}
SIZE, INNER = 32, 32


def block(cls: type[nn.Module], experts: int = 8, top_k: int = 2) -> nn.Module:
    """Make one with random weights, large enough for the experts to matter."""
    torch.manual_seed(0)
    module = cls(SIZE, experts, top_k, INNER)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def inputs(tokens: int = 10, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, tokens, SIZE, generator=torch.Generator().manual_seed(1)).to(dtype)
