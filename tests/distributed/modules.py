"""Modules of transformers at tiny sizes, each with what surrounds it where a model is spread over devices."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import Gemma3TextConfig, Phi3Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tests.distributed.parallel import mesh

SIZE = 32


def normal(*shape: int, seed: int = 1) -> Tensor:
    """A leaf of autograd, the same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Holder(nn.Module):
    """Gives a module the name ``block``, which a plan can name."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.other = nn.Parameter(torch.zeros(1))  # a norm without weights is on no device by itself

    def forward(self, *inputs: Tensor) -> Any:
        return self.block(*inputs)


class Along(Holder):
    """A block that sees part of its inputs along a dimension, as local tensors or as DTensors."""

    def __init__(self, block: nn.Module, dim: int, local: bool = False) -> None:
        super().__init__(block)
        self.dim, self.local = dim, local

    def forward(self, *inputs: Tensor) -> Tensor:
        if inputs[0].device.type == "cpu":
            return self.block(*inputs)
        devices = mesh()
        parts = [DTensor.from_local(x, devices, [Replicate()], run_check=False) for x in inputs]
        parts = [x.redistribute(placements=[Shard(self.dim)]) for x in parts]
        y = self.block(*[x.to_local() for x in parts] if self.local else parts)
        if not isinstance(y, DTensor):
            y = DTensor.from_local(y, devices, [Shard(self.dim)], shape=inputs[0].shape, stride=inputs[0].stride())
        return y.full_tensor()


def mlp() -> Holder:
    """With gate and up apart, SiLU."""
    return Holder(Qwen3MLP(Qwen3Config(hidden_size=SIZE, intermediate_size=64)))


def gelu_mlp() -> Holder:
    """The same with GELU."""
    return Holder(Gemma3MLP(Gemma3TextConfig(hidden_size=SIZE, intermediate_size=64)))


def fused_mlp() -> Holder:
    """With gate and up in one."""
    return Holder(Phi3MLP(Phi3Config(hidden_size=SIZE, intermediate_size=64, pad_token_id=0)))


def mixture() -> Holder:
    """Router and experts."""
    config = Qwen3MoeConfig(
        hidden_size=SIZE, moe_intermediate_size=SIZE, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True
    )
    config._experts_implementation = "grouped_mm"
    return Holder(Qwen3MoeSparseMoeBlock(config))


class OneSided(Holder):
    """All tokens go to the experts of the first rank."""

    def __init__(self) -> None:
        super().__init__(mixture().block)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.block.gate.weight[:2].abs_()
            self.block.gate.weight[2:].abs_().neg_()
        return self.block(x.abs())
