"""Makes a small instance of a norm of transformers, and arguments for it."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

SIZE = 32


def instance(cls: type[nn.Module], seed: int = 0) -> nn.Module:
    """Make a small one with weights that are neither one nor zero."""
    values: dict[str, Any] = {
        "hidden_size": SIZE,
        "dim": SIZE,
        "hidden_dim": SIZE,
        "num_features": SIZE,
    }
    required: dict[str, Any] = {}
    for name, parameter in list(inspect.signature(cls.__init__).parameters.items())[1:]:
        if name in values:
            required[name] = values[name]
        elif name == "group_size":
            required[name] = SIZE // 4 if parameter.default is parameter.empty else None
        elif name == "config":
            required[name] = type("Config", (), {"eps": 1e-5, "hidden_size": SIZE})
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{cls.__name__} wants {name}")
    module = cls(**required)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5 + 0.3)
    return module


def inputs(module: nn.Module, dtype: torch.dtype, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    gates = "gate" in inspect.signature(type(module).forward).parameters
    return [torch.randn(4, 6, SIZE, generator=generator).to(dtype) for _ in range(1 + gates)]
