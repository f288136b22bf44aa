"""The gated MLPs of transformers that do more than multiply: they drop out, clamp, scale, norm, or choose weights."""

from typing import Any

from torch import nn

from kernels_ext_npu.patterns.gated_mlps import (
    GATED,
    activated_layer,
    gated_layer,
    refuse_fused,
    refuse_gated,
)
from kernels_ext_npu.patterns.pattern import Pattern, misread, patterns_for, require


def _refuse_all_but_silu(module: nn.Module) -> str | None:
    reason = refuse_gated(module)
    if reason is None and activated_layer(module) != "SwiGLUMLP":
        return "its activation is not silu, the only one of which the kernel takes a clamped or scaled gate"
    return reason


def _refuse_limit(module: nn.Module) -> str | None:
    names, members = ("limit", "swiglu_limit"), vars(module)  # in the order in which the kernel looks for them
    named, taken = (
        next((n for n in names if n in place), None) for place in (type(module).forward.__code__.co_names, members)
    )
    if taken is None or taken != named:
        return misread(taken, named)
    limit = members[taken]
    if not isinstance(limit, (float, int)) or limit <= 0:
        return f"its limit is {limit!r}, not a positive number"
    return _refuse_all_but_silu(module)


def _refuse_multipliers(module: Any) -> str | None:
    factors = module.gate_multiplier, module.down_multiplier
    if not all(isinstance(factor, (float, int)) for factor in factors) or not factors[0]:
        return f"its multipliers are {factors}, not numbers of which the first is not zero"
    return _refuse_all_but_silu(module)


def _is_unclamped(module: Any) -> bool:
    return module.limit == float("inf")


_UNCLAMPED = require(
    _is_unclamped,
    "it clamps what its activation gives (limit is {0.limit}), which no operator does",
    refuse_gated,
)
PATTERNS = (
    *patterns_for(
        ("DropoutMLP",),
        "t5gemma:T5GemmaMLP",
        "longt5:LongT5DenseGatedActDense",
        "t5:T5DenseGatedActDense",
        limits=refuse_gated,
    ),
    Pattern("modernbert:ModernBertMLP", ("FusedDropoutMLP",), refuse_fused),
    Pattern("seed_oss:SeedOssMLP", ("DroppedMLP",), refuse_gated),
    Pattern("inkling:InklingMLP", ("GloballyScaledMLP",), refuse_gated),
    Pattern("bitnet:BitNetMLP", ("NormedMLP",), refuse_gated),
    *patterns_for(
        ("ClampedSwiGLUMLP",), "deepseek_v4:DeepseekV4MLP", "glm5_next:Glm5NextTextMLP", limits=_refuse_limit
    ),
    Pattern("step3p7:Step3p7MLP", GATED, _UNCLAMPED, gated_layer, holds=_is_unclamped),
    Pattern("falcon_h1:FalconH1MLP", ("ScaledSwiGLUMLP",), _refuse_multipliers),
    Pattern("moshi:MoshiGatingMLP", ("FusedMLPByLayer",), refuse_fused),
    Pattern("zamba2:Zamba2MLP", ("FusedAdaptedMLP",), refuse_fused),
)
