"""Gated MLPs one after the other, trained for some steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.swaps import gate_up_layout
from tests.distributed.modules import SIZE, gelu_mlp, mlp, normal
from tests.distributed.parallel import seeded


class Stack(nn.Module):
    """Two MLPs with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([mlp().block, gelu_mlp().block])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def build() -> Stack:
    """The same on every rank."""
    return seeded(Stack, 0.1)


def batch() -> Tensor:
    """Inputs for all ranks together."""
    return normal(4, 5, SIZE)


def is_packed(model: nn.Module) -> list[bool]:
    """Whether gate and up of each MLP are one product."""
    with_pairs = filter(gate_up_layout.called, model.modules())
    return [gate_up_layout.why_not_packed(module) is None for module in with_pairs]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """A mean over the batch, as that of what ranks have of it."""
    return model(x).square().mean(0).sum()


def train(model: nn.Module, x: Tensor, meanwhile: Callable[[int], Any] = lambda step: None) -> None:
    """Three steps of SGD with momentum: an error in a gradient grows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        meanwhile(step)


def trained_on_the_cpu(x: Tensor) -> dict[str, Tensor]:
    """The parameters that plain modules have then."""
    model = build()
    train(model, x)
    return dict(model.named_parameters())
