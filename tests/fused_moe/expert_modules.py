"""Makes small experts of transformers and small blocks with a list of experts, and arguments for them."""

import torch
from torch import Tensor, nn

EXPERTS, HIDDEN, INNER = 6, 32, 64


class Config:
    """Answer what experts ask of a config, by the name they ask for."""

    _experts_implementation = "eager"
    hidden_act = hidden_activation = "silu"
    mlp_hidden_act = "relu2"
    moe_latent_size = None  # NemotronH: as wide as the tokens
    swiglu_limit = swiglu_clamp_limit = 7.0
    swiglu_alpha = 1.702
    rms_norm_eps = 1e-6

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and "size" not in name:
            return EXPERTS
        if any(word in name for word in ("intermediate", "ffn", "inner", "expert")):
            return INNER
        if any(word in name for word in ("cap", "limit")):
            return 20.0
        if "eps" in name:
            return 1e-6
        return HIDDEN


def instance(cls: type[nn.Module], activation: str | None = None) -> nn.Module:
    """Make a small one with random weights, scaled to keep what goes through them."""
    config = Config()
    if activation is not None:
        config.hidden_act = config.hidden_activation = activation
    torch.manual_seed(0)
    module = cls(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1 if "norm" in name else 0, 0.2 if parameter.dim() < 3 else parameter.shape[1] ** -0.5)
    return module


def inputs(module: nn.Module, tokens: int = 24, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Make tokens, the experts that they go to, and how much each counts; one expert gets no token."""
    torch.manual_seed(1)
    x = torch.randn(tokens, HIDDEN)
    index = torch.rand(tokens, EXPERTS - 1).topk(k, -1).indices
    return x, index, torch.rand(tokens, k)


def block(cls: type[nn.Module], experts: int = 8, top_k: int = 2) -> nn.Module:
    """Make one with random weights, large enough for the experts to matter."""
    torch.manual_seed(0)
    module = cls(HIDDEN, experts, top_k, HIDDEN)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def block_inputs(tokens: int = 10, dtype: torch.dtype = torch.float32) -> Tensor:
    """Make tokens for such a block."""
    return torch.randn(1, tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
