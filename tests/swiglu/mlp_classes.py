"""Make a small instance of a gated MLP of transformers, and arguments for it."""

import inspect

import torch
from torch import Tensor, nn

SIZE, INNER = 32, 64
LIMIT = 0.5  # which some values reach
# what is not in a config, by class
GIVEN = {"Zamba2MLP": {"num_fwd_mem_blocks": 1, "block_id": 0}}
# what a forward takes beside hidden states
ARGUMENTS = {"Zamba2MLP": {"layer_idx": 0}}


class Size(int):
    """Give one size, also where a size for each layer is asked."""

    def __getitem__(self, layer: int) -> int:
        return int(self)


class Config:
    """Answer what an MLP asks of a config, by the name it asks for."""

    def __init__(self, activation: str, bias: bool, dropout: float = 0.0) -> None:
        self.activation, self.bias, self.dropout = activation, bias, dropout

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if "bias" in name:
            return self.bias
        if "act" in name and "sparsity" not in name:
            return self.activation
        if any(word in name for word in ("drop", "sparsity")):
            return [0.0] * 4 if "pattern" in name else self.dropout if "drop" in name else 0.0
        if any(word in name for word in ("intermediate", "ffn", "inner", "mlp_dim")):
            return Size(INNER)
        if name == "layer_idx":
            return 0
        if name == "kv_sharing_modes":
            return (None,)
        if "limit" in name:
            return None if "limits" in name else LIMIT
        if name == "mlp_multipliers":
            return 0.875, 0.625
        if name == "hybrid_layer_ids":
            return (0,)
        if "multiple" in name:
            return 1
        if name.startswith(("use_", "is_", "tie_")):
            return False
        return SIZE


def instance(cls: type[nn.Module], activation: str = "silu", bias: bool = False, dropout: float = 0.0) -> nn.Module:
    """Make a small one with random weights."""
    config = Config(activation, bias, dropout)
    given = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            given[name] = config if name == "config" else getattr(config, name)
    torch.manual_seed(0)
    module = cls(**given | GIVEN.get(cls.__name__, {}))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return module


def inputs(module: nn.Module, dtype: torch.dtype = torch.float32) -> Tensor:
    sizes = [child.in_features for child in module.children() if isinstance(child, nn.Linear)]
    return torch.randn(2, 5, (sizes or [SIZE])[0], generator=torch.Generator().manual_seed(1)).to(dtype)
