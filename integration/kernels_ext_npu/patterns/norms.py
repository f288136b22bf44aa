"""The norms of transformers, and on which instances the kernels serve them.

RMS norms; layer norms that are written out, and those of a sum, as encoders have them behind a residual; and
hyper-connections, which norm: weights by which residual streams become one, and a result all of them.
"""

from typing import Any

from torch import nn
from transformers.activations import SiLUActivation

from kernels_ext_npu.module_state import COMPUTED, TORCH_CALL, all_have_hooks, static_getattr
from kernels_ext_npu.patterns.pattern import Guard, Part, Pattern, ignores, require


def _refuse_eps(module: Any) -> str | None:
    found = [getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)]
    if found == [None] and isinstance(module, nn.RMSNorm):  # the kernel takes that of float32 then, as torch does
        return None
    for eps in found or [None]:
        if not isinstance(eps, (float, int)):
            return f"its eps is {eps!r}, not a number"
        if eps != found[0]:
            return f"its variance_epsilon is {found[0]} and its eps {eps}: the kernel reads the first"
    return None


def _refuse_weighted(module: nn.Module) -> str | None:
    weight = static_getattr(module, "weight")
    if weight is None:
        return "it has no weight"
    if weight is not COMPUTED and (weight.dim() != 1 or not weight.is_floating_point()):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, not a vector of floats"
    return _refuse_eps(module)


def _refuse_optional_weight(module: nn.Module) -> str | None:
    return _refuse_eps(module) if static_getattr(module, "weight") is None else _refuse_weighted(module)


def _refuse_dimensions(module: Any) -> str | None:
    dimensions = len(module.normalized_shape)
    return None if dimensions == 1 else f"it norms over {dimensions} dimensions, the kernel over one"


_SCALED = Guard(
    lambda module: module.with_scale == (static_getattr(module, "weight") is not None),
    "with_scale is {0.with_scale}, which its weight contradicts",
)
_WHOLE = Guard(lambda module: module.group_size is None, "it norms groups of the last dimension")
_UNBIASED = Guard(lambda module: module.bias is None, "it adds a bias")
_REDUCED_IN_FLOAT32 = require(
    lambda module: module.force_float32_reductions,
    "it squares in the dtype of its input, the kernel in float32",
    _refuse_weighted,
)
_GATES = SiLUActivation, nn.SiLU, nn.Sigmoid
_FORWARDS = [cls.forward for cls in _GATES]


def _is_gated_as_named(_: Any) -> bool:
    """Tell whether nobody has replaced the forwards or calls of the activations that the forward creates."""
    return [cls.forward for cls in _GATES] == _FORWARDS and all(cls.__call__ is TORCH_CALL for cls in _GATES)


_UNWATCHED = require(
    lambda module: not all_have_hooks() and _is_gated_as_named(module),
    "hooks watch its activation, or it was replaced, and the kernel does not call it",
    _refuse_weighted,
)
_ACTIVATED = require(
    lambda module: module.activation in ("silu", "swish", "sigmoid"),
    "its activation is {0.activation!r}, the kernel has silu and sigmoid",
    _UNWATCHED,
)


def _refuse_weight(module: nn.Module) -> str | None:
    weight = static_getattr(module, "weight")
    if weight is not COMPUTED and not weight.is_floating_point():
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}"
    return _refuse_eps(module)


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


_ROUNDS = require(
    lambda module: module.hc_eps > 0 and module.hc_sinkhorn_iters >= 1,
    "hc_eps is {0.hc_eps} and hc_sinkhorn_iters {0.hc_sinkhorn_iters}: its weights may have no logarithm",
)
_NORMED = (Part("input_norm", ("deepseek_v4:DeepseekV4UnweightedRMSNorm",), "its input_norm is a {}"),)
# gives the scale of a norm, and not what it norms
_SCALE_ALONE = (Part("input_norm", ("hy_v4:HYV4UnweightedRMSNorm",), "its input_norm is a {}"),)

PATTERNS = (
    Pattern("llama:LlamaRMSNorm", ("RMSNorm",), _refuse_weighted),
    Pattern("llama4:Llama4TextRMSNorm", ("RMSNorm",), _refuse_weighted),
    Pattern("cpmant:CpmAntLayerNorm", ("RMSNorm",), _refuse_weighted),
    # in the dtype of its arguments, and the kernel in float32
    Pattern("gradium_phonon_tts:GradiumPhononTTSTimestepNorm", ("RMSNorm",), _refuse_weighted),
    Pattern("olmo2:Olmo2RMSNorm", ("RMSNormCastLast",), _refuse_weighted),
    Pattern("helium:HeliumRMSNorm", ("RMSNormCastLast",), _refuse_weighted),
    Pattern("moshi:MoshiRMSNorm", ("RMSNormCastLast",), _refuse_weighted),
    Pattern("gemma4:Gemma4RMSNorm", ("RMSNormCastLast",), _refuse_optional_weight, guard=_SCALED),
    Pattern("torch:RMSNorm", ("RMSNormCastLast",), lambda m: _refuse_dimensions(m) or _refuse_optional_weight(m)),
    Pattern("xlstm:xLSTMRMSNorm", ("RMSNorm",), _REDUCED_IN_FLOAT32, guard=_UNBIASED),
    Pattern("gemma:GemmaRMSNorm", ("RMSNormZeroCentered",), _refuse_weighted),
    Pattern("muse_spark:MuseSparkTextCenteredRMSNorm", ("RMSNormZeroCentered",), _refuse_weighted),
    Pattern("qwen4_exp:Qwen4ExpTextRMSNorm", ("RMSNormZeroCentered",), _refuse_weighted, guard=_WHOLE),
    Pattern("nanochat:NanoChatRMSNorm", ("RMSNormWeightless",), _refuse_eps),
    Pattern("inkling2:Inkling2UnweightedRMSNorm", ("RMSNormWeightless",), _refuse_eps),
    Pattern("deepseek_v4:DeepseekV4UnweightedRMSNorm", ("RMSNormWeightless",), _refuse_eps),
    Pattern("t5:T5LayerNorm", ("T5LayerNorm",), _refuse_weighted),
    Pattern("qwen3_next:Qwen3NextRMSNormGated", ("RMSNormGated",), _ACTIVATED),
    Pattern("kimi_linear:KimiLinearRMSNormGated", ("RMSNormGatedCastLast",), _ACTIVATED),
    Pattern("mamba2:MambaRMSNormGated@5.22", ("MambaRMSNormGated",), ignores(_refuse_weighted, group_size=None)),
    Pattern("zamba2:Zamba2RMSNormGated", ("MambaRMSNormGated",), _refuse_weighted),
    Pattern("cohere:CohereLayerNorm", ("LayerNormFloat32",), _refuse_weight),
    Pattern("deberta:DebertaLayerNorm", ("LayerNorm",), _AFFINE),
    Pattern(
        "olmo:OlmoLayerNorm", ("LayerNormFloat32",), ignores(_refuse_dimensions, weight=None, variance_epsilon=1e-5)
    ),
    Pattern("bert:BertSelfOutput", ("AddLayerNorm",), _refuse_norm),
    Pattern("deepseek_v4:DeepseekV4HyperConnection", ("HyperConnection",), _ROUNDS, parts=_NORMED),
    Pattern("hy_v4:HYV4HyperConnection", ("IndependentHyperConnection",), parts=_SCALE_ALONE),
    Pattern("deepseek_v4:DeepseekV4HyperHead", ("HyperHead",), parts=_NORMED),
    Pattern("hy_v4:HYV4HyperHead", ("HyperHead",), parts=_SCALE_ALONE),
)
