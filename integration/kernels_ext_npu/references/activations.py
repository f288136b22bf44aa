"""The activations of transformers that are written out in several operators, and that one launch computes."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kernels_ext_npu.references.reference import Reference


class NewGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))


class AccurateGELUActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.precomputed_constant = math.sqrt(2 / math.pi)

    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1 + torch.tanh(self.precomputed_constant * (input + 0.044715 * torch.pow(input, 3))))


class FastGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1.0 + torch.tanh(input * 0.7978845608 * (1.0 + 0.044715 * input * input)))


class QuickGELUActivation(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input * torch.sigmoid(1.702 * input)


def _refuse_constant(module: AccurateGELUActivation) -> str | None:
    if module.precomputed_constant != math.sqrt(2 / math.pi):
        return f"its factor is {module.precomputed_constant!r}, that of the kernel is the root of 2 / pi"
    return None


ACTIVATIONS = (
    Reference(NewGELUActivation, ("NewGELU",), lambda _: None, lambda _: "NewGELU"),
    Reference(AccurateGELUActivation, ("NewGELU",), _refuse_constant, lambda _: "NewGELU"),
    Reference(FastGELUActivation, ("FastGELU",), lambda _: None, lambda _: "FastGELU"),
    Reference(QuickGELUActivation, ("QuickGELU",), lambda _: None, lambda _: "QuickGELU"),
)
