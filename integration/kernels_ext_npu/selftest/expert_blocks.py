"""Makes small blocks with a list of experts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernels_ext_npu.patterns.moe import moe_blocks_v4

BLOCKS = {pattern.module: pattern.layers[0] for pattern in moe_blocks_v4.PATTERNS}
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
