"""Makes a small instance of a norm of transformers, and arguments for it."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 32


def instance(cls: type[nn.Module], seed: int = 0) -> nn.Module:
    """Make a small one with weights that are neither one nor zero."""
    parameters = inspect.signature(cls).parameters
    given: dict[str, Any] = dict.fromkeys(("hidden_size", "dim", "hidden_dim", "num_features"), SIZE)
    given["config"] = type("Config", (), {"eps": 1e-5, "hidden_size": SIZE})
    if "group_size" in parameters:
        given["group_size"] = SIZE // 4 if parameters["group_size"].default is inspect.Parameter.empty else None
    module = cls(**{name: value for name, value in given.items() if name in parameters})
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5 + 0.3)
    return module


def inputs(module: nn.Module, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gates = "gate" in inspect.signature(type(module).forward).parameters
    return [torch.randn(4, 6, SIZE, generator=generator).to(dtype) for _ in range(1 + gates)]
