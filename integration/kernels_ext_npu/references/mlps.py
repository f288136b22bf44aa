"""The gated MLPs of transformers, and on which instances the kernels serve them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from kernels_ext_npu.references.mlp_activations import (
    ACTIVATED_BY,
    fused_layer,
    gated_layer,
    refuse_activation,
    refuse_gated,
)
from kernels_ext_npu.references.reference import Reference


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu", bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.act_fn = ACT2FN[hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return down_proj  # noqa: RET504  as transformers writes it


class Qwen2_5_VLMLP(LlamaMLP):  # noqa: N801  as transformers writes it
    def forward(self, hidden_state: Tensor) -> Tensor:  # type: ignore[override]
        return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))


class RecurrentGemmaMlp(LlamaMLP):
    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        gate = self.act_fn(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


class Gemma3nTextMLP(LlamaMLP):
    """The MLP that in some layers sets all but the largest gates to zero, which the kernel does not."""

    def __init__(self, hidden_size: int, intermediate_size: int, activation_sparsity: float = 0.0) -> None:
        super().__init__(hidden_size, intermediate_size, "gelu_pytorch_tanh")
        self.activation_sparsity = activation_sparsity

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        gate_proj = self.gate_proj(hidden_states)
        if self.activation_sparsity > 0.0:
            gate_proj = self._gaussian_topk(gate_proj)
        activations = self.act_fn(gate_proj)
        up_proj = self.up_proj(hidden_states)
        down_proj = self.down_proj(activations * up_proj)
        return down_proj  # noqa: RET504  as transformers writes it

    def _gaussian_topk(self, inputs: Tensor) -> Tensor:
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

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        activated = (self.act_fn(gate.float()) * up.float()).to(gate.dtype)
        return self.down_proj(activated)


class Llama4TextMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.activation_fn = ACT2FN["silu"]

    def forward(self, x: Tensor) -> Tensor:
        down_proj = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(down_proj)


class Lfm2MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.w3 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.w2 = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class MixtralBlockSparseTop2MLP(nn.Module):
    """The expert of Mixtral in transformers 4, where each is a module of its own."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu") -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.w2 = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.act_fn = ACT2FN[hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        current_hidden_states = self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states)
        current_hidden_states = self.w2(current_hidden_states)
        return current_hidden_states  # noqa: RET504  as transformers writes it


class Phi3MLP(nn.Module):
    """The MLP with gate and up in one projection, the gate first."""

    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu") -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.activation_fn = ACT2FN[hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


class GraniteMoeSharedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu") -> None:
        super().__init__()
        self.input_linear = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.output_linear = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.activation = ACT2FN[hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.input_linear(hidden_states)
        chunked_hidden_states = hidden_states.chunk(2, dim=-1)
        hidden_states = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
        hidden_states = self.output_linear(hidden_states)
        return hidden_states  # noqa: RET504  as transformers writes it


def _refuse_sparse(module: Gemma3nTextMLP) -> str | None:
    if module.activation_sparsity > 0:
        return f"it keeps the largest gates only (activation_sparsity is {module.activation_sparsity})"
    return refuse_gated(module)


def _gated(module: type[nn.Module], refuse: Callable = refuse_gated) -> Reference:
    return Reference(module, tuple(ACTIVATED_BY), refuse, gated_layer)


def _fused(module: type[nn.Module]) -> Reference:
    return Reference(module, tuple(f"Fused{layer}" for layer in ACTIVATED_BY), refuse_activation, fused_layer)


MLPS = (
    _gated(LlamaMLP),
    _gated(Qwen2_5_VLMLP),
    _gated(RecurrentGemmaMlp),
    _gated(Gemma3nTextMLP, _refuse_sparse),
    _gated(BeamMLP),
    _gated(Llama4TextMLP),
    _gated(Lfm2MLP),
    _gated(MixtralBlockSparseTop2MLP),
    _fused(Phi3MLP),
    _fused(GraniteMoeSharedMLP),
)
