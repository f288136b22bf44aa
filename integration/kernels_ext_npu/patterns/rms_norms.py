"""The RMS norms of transformers, and on which instances the kernels serve them."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN, SiLUActivation

from kernels_ext_npu.module_state import COMPUTED, TORCH_CALL, all_have_hooks, static_getattr
from kernels_ext_npu.patterns.pattern import Pattern, ignores, patterns_for, require, reworded


class Norm(nn.Module):
    """The members of norms, of which each reads some."""

    def __init__(self, hidden_size: int = 0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size)) if hidden_size else None
        self.eps = self.variance_epsilon = eps


class LlamaRMSNorm(Norm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


# the norms that round once, at their end
_ROUNDED_ONCE = {"self.weight * hidden_states.to(input_dtype)": "(self.weight * hidden_states).to(input_dtype)"}
_WEIGHT_IN_FLOAT32 = {"self.weight * hidden_states": "self.weight.to(torch.float32) * hidden_states"}
Olmo2RMSNorm = reworded("Olmo2RMSNorm", LlamaRMSNorm, _ROUNDED_ONCE)
HeliumRMSNorm = reworded("HeliumRMSNorm", Olmo2RMSNorm, _WEIGHT_IN_FLOAT32)


class T5LayerNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class TimestepRMSNorm(LlamaRMSNorm):
    """The norm of Gradium's text to speech, in the dtype of its arguments; the kernel computes in float32."""

    def forward(self, hidden_states):
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class NanoChatRMSNorm(Norm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return self._norm(x.float()).type_as(x)


class DeepseekV4UnweightedRMSNorm(NanoChatRMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class Inkling2UnweightedRMSNorm(NanoChatRMSNorm):
    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.float()
        hidden_states = hidden_states * torch.rsqrt(hidden_states.square().mean(-1, keepdim=True) + self.eps)
        return hidden_states.to(input_dtype)


class MoshiRMSNorm(NanoChatRMSNorm):
    def forward(self, x):
        output = self._norm(x.float())
        output = output * self.weight.float()
        return output.type_as(x)


# rounds before it multiplies by the weight
_ROUNDED_FIRST = {"(x.float())": "(x.float()).type_as(x)", ".weight.float()": ".weight", "output.type_as(x)": "output"}
Llama4TextRMSNorm = reworded("Llama4TextRMSNorm", MoshiRMSNorm, _ROUNDED_FIRST)
# zero-centred: the scale is 1 + weight, a sum in float32, and in the second one in the dtype of the weight
GemmaRMSNorm = reworded("GemmaRMSNorm", MoshiRMSNorm, {"self.weight.float()": "(1.0 + self.weight.float())"})
MuseSparkRMSNorm = reworded("MuseSparkRMSNorm", MoshiRMSNorm, {"self.weight.float()": "(1.0 + self.weight).float()"})


class Qwen4ExpTextRMSNorm(MoshiRMSNorm):
    group_size: int | None = None
    forward = GemmaRMSNorm.forward

    def _norm(self, x):
        if self.group_size is not None:
            x = x.reshape(*x.shape[:-1], -1, self.group_size)
        output = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return output.flatten(-2) if self.group_size is not None else output


class Gemma4RMSNorm(MoshiRMSNorm):
    """The norm that may have no weight."""

    with_scale = True

    def _norm(self, hidden_states):
        mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps
        return hidden_states * torch.pow(mean_squared, -0.5)

    def forward(self, hidden_states):
        normed_output = self._norm(hidden_states.float())
        if self.with_scale:
            normed_output = normed_output * self.weight.float()
        return normed_output.type_as(hidden_states)


class CpmAntLayerNorm(MoshiRMSNorm):
    def forward(self, hidden_states):
        if hidden_states.size(-1) != self.dim_norm:
            raise AssertionError("hidden_states.size(-1) != self.dim_norm")
        old_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        return (hidden_states * torch.rsqrt(variance + self.eps)).to(old_dtype) * self.weight


class TorchRMSNorm(nn.RMSNorm):
    """The RMS norm that torch has itself."""

    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class XLSTMRMSNorm(MoshiRMSNorm):
    """The norm that may have a weight and a bias, and may square in the dtype of its input."""

    bias, force_float32_reductions = None, True

    def _apply_weight_bias(self, x):
        if self.weight is not None:
            x = x * self.weight
        if self.bias is not None:
            x = x + self.bias
        return x

    def _rms_normalize(self, x):
        in_dtype = x.dtype
        if self.force_float32_reductions:
            x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return x.to(in_dtype)

    def forward(self, x):
        x = self._rms_normalize(x)
        return self._apply_weight_bias(x)


class Qwen3NextRMSNormGated(LlamaRMSNorm):
    """The gated norm that norms first and then multiplies by the gate."""

    activation = "silu"

    def forward(self, hidden_states, gate):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        hidden_states = hidden_states * ACT2FN[self.activation](gate.to(torch.float32))
        return hidden_states.to(input_dtype)


_GATED_AND_ROUNDED_ONCE = {
    "hidden_states, gate": "hidden_states, gate=None",
    "self.weight * hidden_states.to(input_dtype)": "self.weight.to(torch.float32) * hidden_states",
}
# multiplies by the gate first, and then norms
_GATE_FIRST = {
    "self, hidden_states": "self, hidden_states, gate=None",
    "    variance =": """
    if gate is not None:
        hidden_states = hidden_states * nn.functional.silu(gate.to(torch.float32))
    variance =""",
}
# norms groups of the last dimension
_IN_GROUPS = {
    "    variance = hidden_states.": """
    *prefix_dims, last_dim = hidden_states.shape
    group_count = last_dim // self.group_size
    hidden_states_group = hidden_states.view(*prefix_dims, group_count, self.group_size)
    variance = hidden_states_group.""",
    "    hidden_states = hidden_states * torch.rsqrt(": "    hidden_states_group = hidden_states_group * torch.rsqrt(",
    "    return ": """
    hidden_states = hidden_states_group.view(*prefix_dims, group_count * self.group_size)
    return """,
}
KimiLinearRMSNormGated = reworded("KimiLinearRMSNormGated", Qwen3NextRMSNormGated, _GATED_AND_ROUNDED_ONCE)
MambaRMSNormGated = reworded("MambaRMSNormGated", LlamaRMSNorm, _GATE_FIRST)
Zamba2RMSNormGated = reworded("Zamba2RMSNormGated", MambaRMSNormGated, _IN_GROUPS)


def refuse_eps(module: Any) -> str | None:
    found = [getattr(module, name) for name in ("variance_epsilon", "eps") if hasattr(module, name)]
    if found == [None] and isinstance(module, nn.RMSNorm):  # the kernel takes that of float32 then, as torch does
        return None
    for eps in found or [None]:
        if not isinstance(eps, (float, int)):
            return f"its eps is {eps!r}, not a number"
        if eps != found[0]:
            return f"its variance_epsilon is {found[0]} and its eps {eps}: the kernel reads the first"
    return None


def refuse_weighted(module: nn.Module) -> str | None:
    weight = static_getattr(module, "weight")
    if weight is None:
        return "it has no weight"
    if weight is not COMPUTED and (weight.dim() != 1 or not weight.is_floating_point()):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, not a vector of floats"
    return refuse_eps(module)


def _refuse_optional_weight(module: nn.Module) -> str | None:
    return refuse_eps(module) if static_getattr(module, "weight") is None else refuse_weighted(module)


def refuse_dimensions(module: Any) -> str | None:
    dimensions = len(module.normalized_shape)
    return None if dimensions == 1 else f"it norms over {dimensions} dimensions, the kernel over one"


def _is_scaled(module: Any) -> bool:
    return module.with_scale == (static_getattr(module, "weight") is not None)


def _is_whole(module: Any) -> bool:
    return module.group_size is None


def _is_unbiased(module: Any) -> bool:
    return module.bias is None


_SCALED = require(
    _is_scaled,
    "with_scale is {0.with_scale}, which its weight contradicts",
    _refuse_optional_weight,
)
_WHOLE = require(_is_whole, "it norms groups of the last dimension", refuse_weighted)
_REDUCED_IN_FLOAT32 = require(
    lambda module: module.force_float32_reductions,
    "it squares in the dtype of its input, the kernel in float32",
    refuse_weighted,
)
_GATES = SiLUActivation, nn.SiLU, nn.Sigmoid
_FORWARDS = [cls.forward for cls in _GATES]


def _is_gated_as_named(_: Any) -> bool:
    """Tell whether nobody has replaced the forwards or calls of the activations that the forward creates."""
    return [cls.forward for cls in _GATES] == _FORWARDS and all(cls.__call__ is TORCH_CALL for cls in _GATES)


_UNWATCHED = require(
    lambda module: not all_have_hooks() and _is_gated_as_named(module),
    "hooks watch its activation, or it was replaced, and the kernel does not call it",
    refuse_weighted,
)
_ACTIVATED = require(
    lambda module: module.activation in ("silu", "swish", "sigmoid"),
    "its activation is {0.activation!r}, the kernel has silu and sigmoid",
    _UNWATCHED,
)
PATTERNS = (
    *patterns_for(
        ("RMSNorm",), LlamaRMSNorm, Llama4TextRMSNorm, CpmAntLayerNorm, TimestepRMSNorm, limits=refuse_weighted
    ),
    *patterns_for(("RMSNormCastLast",), Olmo2RMSNorm, HeliumRMSNorm, MoshiRMSNorm, limits=refuse_weighted),
    Pattern(Gemma4RMSNorm, ("RMSNormCastLast",), _SCALED, holds=_is_scaled),
    Pattern(TorchRMSNorm, ("RMSNormCastLast",), lambda m: refuse_dimensions(m) or _refuse_optional_weight(m)),
    Pattern(
        XLSTMRMSNorm, ("RMSNorm",), require(_is_unbiased, "it adds a bias", _REDUCED_IN_FLOAT32), holds=_is_unbiased
    ),
    *patterns_for(("RMSNormZeroCentered",), GemmaRMSNorm, MuseSparkRMSNorm, limits=refuse_weighted),
    Pattern(Qwen4ExpTextRMSNorm, ("RMSNormZeroCentered",), _WHOLE, holds=_is_whole),
    *patterns_for(("RMSNormWeightless",), NanoChatRMSNorm, Inkling2UnweightedRMSNorm, limits=refuse_eps),
    Pattern(DeepseekV4UnweightedRMSNorm, ("RMSNormWeightless",), refuse_eps),
    Pattern(T5LayerNorm, ("T5LayerNorm",), refuse_weighted),
    Pattern(Qwen3NextRMSNormGated, ("RMSNormGated",), _ACTIVATED),
    Pattern(KimiLinearRMSNormGated, ("RMSNormGatedCastLast",), _ACTIVATED),
    Pattern(MambaRMSNormGated, ("MambaRMSNormGated",), ignores(refuse_weighted, group_size=None)),
    Pattern(Zamba2RMSNormGated, ("MambaRMSNormGated",), refuse_weighted),
)
