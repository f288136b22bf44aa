"""Blocks with routers of other people, what they are given, and what they give."""

import copy

import torch
from torch import nn

import kernels_ext_npu
from tests.integration.recognition.blocks import Block
from tests.integration.recognition.spellings.other_peoples_routers import EXPERTS, ROUTERS, WIDTH, Inferring, Rule

OPERATORS = "npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax"


def made(cls: type[nn.Module]) -> tuple[Block, nn.Module, Rule]:
    """Make a block with kernels on the NPU, its plain router on the CPU, and what that is to compute."""
    torch.manual_seed(0)
    plain = cls().eval()
    return kernels_ext_npu.kernelize(Block(copy.deepcopy(plain)).to("npu")), plain, ROUTERS[cls]


def given(plain: nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    shape = (10, WIDTH) if isinstance(plain, Inferring) else (2, 5, WIDTH)
    return torch.randn(shape).to(dtype)


def spread(rule: Rule, result: tuple[object, ...]) -> torch.Tensor:
    """Return the weights of all experts, ``[T, E]``, which say which are chosen too."""
    experts, weights = (result[place].flatten(0, -2).cpu() for place in rule.places)
    if weights.shape != experts.shape:  # they are already
        return weights
    return torch.zeros(len(experts), EXPERTS, dtype=weights.dtype).scatter(1, experts.long(), weights)
