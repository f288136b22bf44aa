"""The gated MLPs of transformers that do more than multiply: they drop out, clamp, scale, norm, or choose weights."""

from typing import Any

import torch
from torch import nn

from kernels_ext_npu.patterns.gated_mlps import (
    GATED,
    MLP,
    activated_layer,
    gated_layer,
    refuse_fused,
    refuse_gated,
)
from kernels_ext_npu.patterns.pattern import Pattern, misread, patterns_for, require, reworded


class T5GemmaMLP(MLP):
    def forward(self, x):
        hidden_states = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        hidden_states = self.dropout(hidden_states)
        return self.down_proj(hidden_states)


class LongT5DenseGatedActDense(MLP):
    def forward(self, hidden_states):
        hidden_gelu = self.act(self.wi_0(hidden_states))
        hidden_linear = self.wi_1(hidden_states)
        hidden_states = hidden_gelu * hidden_linear
        hidden_states = self.dropout(hidden_states)
        return self.wo(hidden_states)


T5DenseGatedActDense = reworded(  # its last projection may stay in float32
    "T5DenseGatedActDense",
    LongT5DenseGatedActDense,
    {
        "    return": """
    if (
        isinstance(self.wo.weight, torch.Tensor)
        and hidden_states.dtype != self.wo.weight.dtype
        and self.wo.weight.dtype != torch.int8
    ):
        hidden_states = hidden_states.to(self.wo.weight.dtype)
    return"""
    },
)


class ModernBertMLP(MLP):
    def forward(self, hidden_states):
        input, gate = self.Wi(hidden_states).chunk(2, dim=-1)
        return self.Wo(self.drop(self.act(input) * gate))


class SeedOssMLP(MLP):
    residual_dropout = 0.1

    def forward(self, x):
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return nn.functional.dropout(down_proj, p=self.residual_dropout, training=self.training)


class InklingMLP(MLP):
    def forward(self, hidden_states):
        hidden_states = self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        return hidden_states * self.global_scale


class BitNetMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.ffn_sub_norm(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class DeepseekV4MLP(MLP):
    def forward(self, x):
        gate = self.gate_proj(x).clamp(max=self.limit)
        up = self.up_proj(x).clamp(min=-self.limit, max=self.limit)
        return self.down_proj(self.act_fn(gate) * up)


# clamps what its activation gives: no operator does that, and it is served where the limit is none
_CLAMPED_LATE = {"self.gate_proj(x)": "self.act_fn(self.gate_proj(x))", "self.act_fn(gate)": "gate"}
Step3p7MLP = reworded("Step3p7MLP", DeepseekV4MLP, _CLAMPED_LATE)


class Glm5NextMLP(MLP):
    def forward(self, x):
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        gate = gate.clamp(min=None, max=self.swiglu_limit)
        up = up.clamp(min=-self.swiglu_limit, max=self.swiglu_limit)
        return self.down_proj(self.act_fn(gate) * up)


class FalconH1MLP(MLP):
    gate_multiplier, down_multiplier = 0.875, 0.625

    def forward(self, x):
        y = self.up_proj(x) * self.act_fn(self.gate_proj(x) * self.gate_multiplier)
        return self.down_proj(y) * self.down_multiplier


class MoshiGatingMLP(MLP):
    """The MLP whose projections may have weights for each layer: these are chosen by number then."""

    def forward(self, hidden_states, layer_idx=None):
        hidden_states = self.fc1(hidden_states) if layer_idx is None else self.fc1(hidden_states, layer_idx)
        batch_size, sequence_length, _ = hidden_states.shape
        hidden_states = hidden_states.view(batch_size, sequence_length, 2, -1)
        hidden_states = self.activation_fn(hidden_states[..., 0, :]) * hidden_states[..., 1, :]
        return self.fc2(hidden_states) if layer_idx is None else self.fc2(hidden_states, layer_idx)


class Zamba2MLP(MLP):
    """The MLP of blocks that share their weights, with an adapter for each layer."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "gelu") -> None:
        super().__init__(hidden_size, intermediate_size, hidden_act)
        self.gate_up_proj_adapter_list = nn.ModuleList([nn.Linear(hidden_size, 2 * intermediate_size, bias=False)])
        self.layer_dic = {None: 0}

    def forward(self, hidden_state, layer_idx=None):
        gate_up_state = self.gate_up_proj(hidden_state)
        layer_idx = self.layer_dic[layer_idx]
        gate_up_state = gate_up_state + self.gate_up_proj_adapter_list[layer_idx](hidden_state)
        gate_up_state = torch.chunk(gate_up_state, 2, dim=-1)
        hidden_state = self.act_fn(gate_up_state[0]) * gate_up_state[1]
        return self.down_proj(hidden_state)


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
    *patterns_for(("DropoutMLP",), T5GemmaMLP, LongT5DenseGatedActDense, T5DenseGatedActDense, limits=refuse_gated),
    Pattern(ModernBertMLP, ("FusedDropoutMLP",), refuse_fused),
    Pattern(SeedOssMLP, ("DroppedMLP",), refuse_gated),
    Pattern(InklingMLP, ("GloballyScaledMLP",), refuse_gated),
    Pattern(BitNetMLP, ("NormedMLP",), refuse_gated),
    *patterns_for(("ClampedSwiGLUMLP",), DeepseekV4MLP, Glm5NextMLP, limits=_refuse_limit),
    Pattern(Step3p7MLP, GATED, _UNCLAMPED, gated_layer, holds=_is_unclamped),
    Pattern(FalconH1MLP, ("ScaledSwiGLUMLP",), _refuse_multipliers),
    Pattern(MoshiGatingMLP, ("FusedMLPByLayer",), refuse_fused),
    Pattern(Zamba2MLP, ("FusedAdaptedMLP",), refuse_fused),
)
