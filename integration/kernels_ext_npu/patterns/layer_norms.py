"""Layer norms of transformers that are written out, and those of a sum, as encoders have them behind a residual."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kernels_ext_npu.module_state import COMPUTED, static_getattr
from kernels_ext_npu.patterns.pattern import Pattern, ignores, require
from kernels_ext_npu.patterns.rms_norms import Norm, refuse_dimensions, refuse_eps


class CohereLayerNorm(Norm):
    """The layer norm without a bias, in float32 and rounded once."""

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        mean = hidden_states.mean(-1, keepdim=True)
        variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states - mean) * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight.to(torch.float32) * hidden_states
        return hidden_states.to(input_dtype)


class DebertaLayerNorm(CohereLayerNorm):
    """The layer norm that rounds before it multiplies by the weight, and has a bias."""

    def __init__(self, size: int, eps: float = 1e-12) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states):
        input_type = hidden_states.dtype
        hidden_states = hidden_states.float()
        mean = hidden_states.mean(-1, keepdim=True)
        variance = (hidden_states - mean).pow(2).mean(-1, keepdim=True)
        hidden_states = (hidden_states - mean) / torch.sqrt(variance + self.variance_epsilon)
        hidden_states = hidden_states.to(input_type)
        return self.weight * hidden_states + self.bias


class OlmoLayerNorm(nn.Module):
    """The layer norm without weight and bias, whose eps is in its forward."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.normalized_shape = (hidden_size,)

    def forward(self, hidden_states):
        orig_dtype = hidden_states.dtype
        return F.layer_norm(hidden_states.to(dtype=torch.float32), self.normalized_shape, None, None, eps=1e-5).to(
            orig_dtype
        )


class BertSelfOutput(nn.Module):
    """What closes a residual in BERT: a projection, a dropout, and the norm of the sum."""

    def __init__(self, hidden_size: int, p: float = 0.1, eps: float = 1e-12) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size)
        self.LayerNorm = nn.LayerNorm(hidden_size, eps=eps)
        self.dropout = nn.Dropout(p)

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dense(hidden_states)
        hidden_states = self.dropout(hidden_states)
        return self.LayerNorm(hidden_states + input_tensor)


def _refuse_weight(module: nn.Module) -> str | None:
    weight = static_getattr(module, "weight")
    if weight is not COMPUTED and not weight.is_floating_point():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return refuse_eps(module)


def _refuse_norm(module: Any) -> str | None:
    norm = module.LayerNorm
    if type(norm) is not nn.LayerNorm:
        return f"its norm is a {type(norm).__module__}.{type(norm).__name__}"
    if len(norm.normalized_shape) != 1 or norm.weight is None or norm.bias is None:
        return "its norm is over several dimensions, or has no weight or bias"
    return None


_AFFINE = require(
    lambda module: module.weight.dtype is module.bias.dtype,
    "its weight is {0.weight.dtype} and its bias {0.bias.dtype}",
    _refuse_weight,
)
PATTERNS = (
    Pattern(CohereLayerNorm, ("LayerNormFloat32",), _refuse_weight),
    Pattern(DebertaLayerNorm, ("LayerNorm",), _AFFINE),
    Pattern(OlmoLayerNorm, ("LayerNormFloat32",), ignores(refuse_dimensions, weight=None, variance_epsilon=1e-5)),
    Pattern(BertSelfOutput, ("AddLayerNorm",), _refuse_norm),
)
