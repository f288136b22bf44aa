"""One function of the kernel on the machine at hand: publishing checks it before and after."""

from types import ModuleType

import torch
from torch import Tensor


def trial(kernel: ModuleType, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a function of the kernel gives for ``x``, ``[3, 8]`` in float32, and what it has to give."""
    weight = x.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(kernel.linear(x, weight).sum(), weight)
    return found, x.sum(0).expand(3, 8)
