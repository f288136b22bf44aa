"""The RMS norms of transformers, and on which instances the kernels serve them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from kernels_ext_npu.references.held import COMPUTED, held
from kernels_ext_npu.references.hooks import all_have_hooks
from kernels_ext_npu.references.reference import Reference


class LlamaRMSNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


class Olmo2RMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight * hidden_states).to(input_dtype)


class HeliumRMSNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return (self.weight.to(torch.float32) * hidden_states).to(input_dtype)


class T5LayerNorm(LlamaRMSNorm):
    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        if self.weight.dtype in [torch.float16, torch.bfloat16]:
            hidden_states = hidden_states.to(self.weight.dtype)
        return self.weight * hidden_states


class TimestepRMSNorm(LlamaRMSNorm):
    """The norm of Gradium's text to speech, in the dtype of its arguments; the kernel computes in float32."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + self.variance_epsilon)


class NanoChatRMSNorm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self._norm(x.float()).type_as(x)


class DeepseekV4UnweightedRMSNorm(NanoChatRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype)


class MoshiRMSNorm(NanoChatRMSNorm):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(eps)
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float())
        output = output * self.weight.float()
        return output.type_as(x)


class Llama4TextRMSNorm(MoshiRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float()).type_as(x)
        return output * self.weight


class GemmaRMSNorm(NanoChatRMSNorm):
    """The zero-centred norm: the scale is 1 + weight, and the sum is in float32."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(eps)
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight.float())
        return output.type_as(x)


class MuseSparkTextCenteredRMSNorm(GemmaRMSNorm):
    """The zero-centred norm that adds 1 in the dtype of the weight; the kernel adds it in float32."""

    def forward(self, x: Tensor) -> Tensor:
        output = self._norm(x.float())
        output = output * (1.0 + self.weight).float()
        return output.type_as(x)


class Qwen4ExpTextRMSNorm(GemmaRMSNorm):
    def __init__(self, dim: int, group_size: int | None = None, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
        self.group_size = group_size

    def _norm(self, x: Tensor) -> Tensor:
        if self.group_size is not None:
            x = x.reshape(*x.shape[:-1], -1, self.group_size)
        output = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return output.flatten(-2) if self.group_size is not None else output


class Gemma4RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6, with_scale: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.with_scale = with_scale
        if with_scale:
            self.weight = nn.Parameter(torch.ones(dim))

    def _norm(self, hidden_states: Tensor) -> Tensor:
        mean_squared = hidden_states.pow(2).mean(-1, keepdim=True) + self.eps
        return hidden_states * torch.pow(mean_squared, -0.5)

    def forward(self, hidden_states: Tensor) -> Tensor:
        normed_output = self._norm(hidden_states.float())
        if self.with_scale:
            normed_output = normed_output * self.weight.float()
        return normed_output.type_as(hidden_states)


class CpmAntLayerNorm(nn.Module):
    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.dim_norm = hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: Tensor) -> Tensor:
        if hidden_states.size(-1) != self.dim_norm:
            raise AssertionError("hidden_states.size(-1) != self.dim_norm")
        old_dtype = hidden_states.dtype
        variance = hidden_states.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
        hidden_states = (hidden_states * torch.rsqrt(variance + self.eps)).to(old_dtype) * self.weight
        return hidden_states  # noqa: RET504  as transformers writes it


class TorchRMSNorm(nn.RMSNorm):
    """The RMS norm that torch has itself."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class XLSTMRMSNorm(nn.Module):
    """The norm that may have a weight and a bias, and may square in the dtype of its input."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        use_weight: bool = True,
        use_bias: bool = False,
        force_float32_reductions: bool = True,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.force_float32_reductions = force_float32_reductions
        self.weight = nn.Parameter(torch.ones(num_features)) if use_weight else None
        self.bias = nn.Parameter(torch.zeros(num_features)) if use_bias else None

    def _apply_weight_bias(self, x: Tensor) -> Tensor:
        if self.weight is not None:
            x = x * self.weight
        if self.bias is not None:
            x = x + self.bias
        return x

    def _rms_normalize(self, x: Tensor) -> Tensor:
        in_dtype = x.dtype
        if self.force_float32_reductions:
            x = x.float()
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return x.to(in_dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self._rms_normalize(x)
        x = self._apply_weight_bias(x)
        return x  # noqa: RET504  as transformers writes it


class Qwen3NextRMSNormGated(LlamaRMSNorm):
    """The gated norm that norms first and then multiplies by the gate."""

    def __init__(self, hidden_size: int, eps: float = 1e-6, activation: str = "silu") -> None:
        super().__init__(hidden_size, eps)
        self.activation = activation

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight * hidden_states.to(input_dtype)
        hidden_states = hidden_states * ACT2FN[self.activation](gate.to(torch.float32))
        return hidden_states.to(input_dtype)


class KimiLinearRMSNormGated(Qwen3NextRMSNormGated):
    def forward(self, hidden_states: Tensor, gate: Tensor = None) -> Tensor:  # type: ignore[assignment]
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        hidden_states = self.weight.to(torch.float32) * hidden_states
        hidden_states = hidden_states * ACT2FN[self.activation](gate.to(torch.float32))
        return hidden_states.to(input_dtype)


class MambaRMSNormGated(LlamaRMSNorm):
    """The gated norm that multiplies by the gate first and then norms."""

    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        if gate is not None:
            hidden_states = hidden_states * nn.functional.silu(gate.to(torch.float32))
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states.to(input_dtype)


def _refuse_eps(module: nn.Module) -> str | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return None if isinstance(eps, (float, int)) else f"its eps is {eps!r}, not a number"


def _refuse_weighted(module: nn.Module) -> str | None:
    weight = held(module, "weight")
    if weight is None:
        return "it has no weight"
    if weight is not COMPUTED and (weight.dim() != 1 or not weight.is_floating_point()):
        return f"its weight is {str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}, not a vector of floats"
    return _refuse_eps(module)


def _refuse_optional_weight(module: nn.Module) -> str | None:
    return _refuse_eps(module) if held(module, "weight") is None else _refuse_weighted(module)


def _refuse_gemma4(module: nn.Module) -> str | None:
    if module.with_scale != (held(module, "weight") is not None):
        return f"with_scale is {module.with_scale}, which its weight contradicts"
    return _refuse_optional_weight(module)


def _refuse_torch(module: nn.Module) -> str | None:
    dimensions = len(vars(module)["normalized_shape"])
    if dimensions != 1:
        return f"it norms over {dimensions} dimensions, the kernel over one"
    return _refuse_optional_weight(module)


def _refuse_grouped(module: nn.Module) -> str | None:
    return "it norms groups of the last dimension" if module.group_size is not None else _refuse_weighted(module)


def _refuse_xlstm(module: nn.Module) -> str | None:
    if module.bias is not None:
        return "it adds a bias"
    if not module.force_float32_reductions:
        return "it squares in the dtype of its input, the kernel in float32"
    return _refuse_weighted(module)


def _refuse_gated(module: nn.Module) -> str | None:
    if module.activation not in ("silu", "swish", "sigmoid"):
        return f"its activation is {module.activation!r}, the kernel has silu and sigmoid"
    if all_have_hooks():
        return "hooks watch its activation, which the kernel does not call"
    return _refuse_weighted(module)


def _norm(module: type[nn.Module], layer: str, refuse: Callable = _refuse_weighted) -> Reference:
    return Reference(module, (layer,), refuse, lambda instance: layer)


NORMS = (
    _norm(LlamaRMSNorm, "RMSNorm"),
    _norm(Llama4TextRMSNorm, "RMSNorm"),
    _norm(CpmAntLayerNorm, "RMSNorm"),
    _norm(TimestepRMSNorm, "RMSNorm"),
    _norm(Olmo2RMSNorm, "RMSNormCastLast"),
    _norm(HeliumRMSNorm, "RMSNormCastLast"),
    _norm(MoshiRMSNorm, "RMSNormCastLast"),
    _norm(Gemma4RMSNorm, "RMSNormCastLast", _refuse_gemma4),
    _norm(TorchRMSNorm, "RMSNormCastLast", _refuse_torch),
    _norm(XLSTMRMSNorm, "RMSNorm", _refuse_xlstm),
    _norm(GemmaRMSNorm, "RMSNormZeroCentered"),
    _norm(MuseSparkTextCenteredRMSNorm, "RMSNormZeroCentered"),
    _norm(Qwen4ExpTextRMSNorm, "RMSNormZeroCentered", _refuse_grouped),
    _norm(NanoChatRMSNorm, "RMSNormWeightless", _refuse_eps),
    _norm(DeepseekV4UnweightedRMSNorm, "RMSNormWeightless", _refuse_eps),
    _norm(T5LayerNorm, "T5LayerNorm"),
    _norm(Qwen3NextRMSNormGated, "RMSNormGated", _refuse_gated),
    _norm(KimiLinearRMSNormGated, "RMSNormGated", _refuse_gated),
    _norm(MambaRMSNormGated, "MambaRMSNormGated"),
)
