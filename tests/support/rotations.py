"""What rotary functions give, with gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels_ext_npu.selftest.layers.rotary_arguments import TABLES


def tensors(outputs: Tensor | tuple[Tensor | None, ...]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [t for t in outputs if t is not None]


def results(function: Callable, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return what a function returns, and the gradients of what it rotates."""
    leaves = {
        name: value.detach().requires_grad_(name not in TABLES) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
    }
    outputs = tensors(function(**leaves))
    directions = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out) for out in outputs]
    torch.autograd.backward(outputs, directions)
    rotated = [leaf for leaf in leaves.values() if isinstance(leaf, Tensor) and leaf.requires_grad]
    return [*(out.detach() for out in outputs), *(leaf.grad for leaf in rotated)]  # type: ignore[list-item]
