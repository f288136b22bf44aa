"""The activations of transformers that are written out in several operators, and that one launch computes."""

import math

import torch
from torch import nn

from kernels_ext_npu.patterns.pattern import Pattern, require


class NewGELUActivation(nn.Module):
    def forward(self, input):
        return 0.5 * input * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (input + 0.044715 * torch.pow(input, 3.0))))


class AccurateGELUActivation(nn.Module):
    precomputed_constant = math.sqrt(2 / math.pi)

    def forward(self, input):
        return 0.5 * input * (1 + torch.tanh(self.precomputed_constant * (input + 0.044715 * torch.pow(input, 3))))


class FastGELUActivation(nn.Module):
    def forward(self, input):
        return 0.5 * input * (1.0 + torch.tanh(input * 0.7978845608 * (1.0 + 0.044715 * input * input)))


def gelu_in_a_node(x):
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def gelu_gradient(g, x):
    x = x[0]
    tanh_out = torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))
    ff = 0.5 * x * ((1 - tanh_out * tanh_out) * (0.79788456 + 0.1070322243 * x * x)) + 0.5 * (1 + tanh_out)
    return ff * g


class GeLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return gelu_in_a_node(input)

    @staticmethod
    def backward(ctx, grad_output):
        input = ctx.saved_tensors
        return gelu_gradient(grad_output, input)


class BloomGelu(nn.Module):
    """FastGELUActivation's formula, with a gradient that is written out."""

    def forward(self, x):
        return GeLUFunction.apply(x)


class QuickGELUActivation(nn.Module):
    def forward(self, input):
        return input * torch.sigmoid(1.702 * input)


def _has_root(module: AccurateGELUActivation) -> bool:
    return module.precomputed_constant == math.sqrt(2 / math.pi)


_ROOT = require(_has_root, "its factor is {0.precomputed_constant!r}, that of the kernel is the root of 2 / pi")
PATTERNS = (
    Pattern(NewGELUActivation, ("NewGELU",)),
    Pattern(AccurateGELUActivation, ("NewGELU",), _ROOT, holds=_has_root),
    Pattern(FastGELUActivation, ("FastGELU",)),
    Pattern(BloomGelu, ("FastGELU",)),
    Pattern(QuickGELUActivation, ("QuickGELU",)),
)
