"""Layer norms of transformers that are written out, and those of a sum, as encoders have them behind a residual."""

from typing import Any

from torch import nn

from kernels_ext_npu.module_state import COMPUTED, static_getattr
from kernels_ext_npu.patterns.pattern import Pattern, ignores, require
from kernels_ext_npu.patterns.rms_norms import refuse_dimensions, refuse_eps


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
    Pattern("cohere:CohereLayerNorm", ("LayerNormFloat32",), _refuse_weight),
    Pattern("deberta:DebertaLayerNorm", ("LayerNorm",), _AFFINE),
    Pattern(
        "olmo:OlmoLayerNorm", ("LayerNormFloat32",), ignores(refuse_dimensions, weight=None, variance_epsilon=1e-5)
    ),
    Pattern("bert:BertSelfOutput", ("AddLayerNorm",), _refuse_norm),
)
