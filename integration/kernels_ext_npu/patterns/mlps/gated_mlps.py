"""The gated MLPs of transformers, and on which instances the kernels serve them."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from kernels_ext_npu.patterns.mlps.activation_choice import (
    FUSED,
    GATED,
    fused_layer,
    gated_layer,
    refuse_activation,
    refuse_gated,
)
from kernels_ext_npu.patterns.pattern import Pattern


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = ACT2FN[hidden_act]

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class RecurrentGemmaMlp(LlamaMLP):
    def forward(self, hidden_states):
        gate = self.act_fn(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


class Gemma3nTextMLP(LlamaMLP):
    """The MLP that in some layers sets all but the largest gates to zero, which the kernel does not."""

    def forward(self, hidden_states):
        gate_proj = self.gate_proj(hidden_states)
        if self.activation_sparsity > 0.0:
            gate_proj = self._gaussian_topk(gate_proj)
        activations = self.act_fn(gate_proj)
        up_proj = self.up_proj(hidden_states)
        return self.down_proj(activations * up_proj)

    def _gaussian_topk(self, inputs):
        target_sparsity_tensor = torch.tensor(self.activation_sparsity, dtype=torch.float32, device=inputs.device)
        normal_dist = torch.distributions.normal.Normal(0, 1)
        std_multiplier = normal_dist.icdf(target_sparsity_tensor)
        std_multiplier = std_multiplier.type(inputs.dtype)
        inputs_mean = torch.mean(inputs, dim=-1, keepdim=True)
        inputs_std = torch.std(inputs, dim=-1, keepdim=True, unbiased=False)
        cutoff_x = inputs_mean + inputs_std * std_multiplier
        return nn.functional.relu(inputs - cutoff_x)


class BeamMLP(LlamaMLP):
    """The MLP that multiplies in float32, as the kernel does for all of them."""

    def forward(self, x):
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        activated = (self.act_fn(gate.float()) * up.float()).to(gate.dtype)
        return self.down_proj(activated)


class Llama4TextMLP(nn.Module):
    def forward(self, x):
        down_proj = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(down_proj)


class Lfm2MLP(nn.Module):
    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtralBlockSparseTop2MLP(nn.Module):
    """The expert of Mixtral in transformers 4, where each is a module of its own."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu") -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.w2 = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.act_fn = ACT2FN[hidden_act]

    def forward(self, hidden_states):
        current_hidden_states = self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states)
        return self.w2(current_hidden_states)


class Phi3MLP(nn.Module):
    """The MLP with gate and up in one projection, the gate first."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu") -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.activation_fn = ACT2FN[hidden_act]

    def forward(self, hidden_states):
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


class GraniteMoeSharedMLP(nn.Module):
    def forward(self, hidden_states):
        hidden_states = self.input_linear(hidden_states)
        chunked_hidden_states = hidden_states.chunk(2, dim=-1)
        hidden_states = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
        return self.output_linear(hidden_states)


def _refuse_sparse(module: Any) -> str | None:
    if module.activation_sparsity > 0:
        return f"it keeps the largest gates only (activation_sparsity is {module.activation_sparsity})"
    return refuse_gated(module)


PATTERNS = (
    Pattern(LlamaMLP, GATED, refuse_gated, gated_layer),
    Pattern(RecurrentGemmaMlp, GATED, refuse_gated, gated_layer),
    Pattern(Gemma3nTextMLP, GATED, _refuse_sparse, gated_layer),
    Pattern(BeamMLP, GATED, refuse_gated, gated_layer),
    Pattern(Llama4TextMLP, GATED, refuse_gated, gated_layer),
    Pattern(Lfm2MLP, GATED, refuse_gated, gated_layer),
    Pattern(MixtralBlockSparseTop2MLP, GATED, refuse_gated, gated_layer),
    Pattern(Phi3MLP, FUSED, refuse_activation, fused_layer),
    Pattern(GraniteMoeSharedMLP, FUSED, refuse_activation, fused_layer),
)
