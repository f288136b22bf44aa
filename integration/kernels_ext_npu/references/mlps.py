"""The gated MLPs of transformers, and on which instances the kernels serve them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers.activations import ACT2FN

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


class T5GemmaMLP(LlamaMLP):
    def __init__(self, hidden_size: int, intermediate_size: int, dropout_rate: float = 0.0) -> None:
        super().__init__(hidden_size, intermediate_size, "gelu_pytorch_tanh")
        self.dropout = nn.Dropout(dropout_rate)

    def forward(self, x: Tensor) -> Tensor:
        hidden_states = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        hidden_states = self.dropout(hidden_states)
        down_proj = self.down_proj(hidden_states)
        return down_proj  # noqa: RET504  as transformers writes it


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


_KERNELS: dict[str, Callable[[Tensor], Tensor]] = {
    "SwiGLUMLP": F.silu,
    "GeGLUMLP": partial(F.gelu, approximate="tanh"),
}


def _activation(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the activation of an instance, which transformers sets from the config.

    Lfm2 has none: its forward says silu.
    """
    names = [name for name in ("act_fn", "activation_fn", "activation") if hasattr(module, name)]
    return getattr(module, names[0]) if names else F.silu


def _gated_layer(module: nn.Module) -> str | None:
    """Return the layer with the activation of an instance; None if no layer has it.

    It is told by its values: many classes have one formula.
    """
    activation = _activation(module)
    if isinstance(activation, nn.Module) and any(True for _ in (*activation.parameters(), *activation.buffers())):
        return None
    with _disable_current_modes(), torch.no_grad():  # with fake tensors there would be no values
        grid = torch.linspace(-9, 9, 181, device="cpu")
        try:
            values = getattr(activation, "forward", activation)(grid.clone())  # not its hooks
        except Exception:  # it wants something else than one tensor on the CPU
            return None
        for layer, kernel in _KERNELS.items():
            # float32 leaves 1e-6 between two ways to compute tanh; the next of kin, quick gelu, is 2e-2 away
            if isinstance(values, Tensor) and torch.allclose(values, kernel(grid), rtol=0, atol=1e-5):
                return layer
    return None


def _fused_layer(module: nn.Module) -> str | None:
    layer = _gated_layer(module)
    return layer and f"Fused{layer}"


def _refuse_activation(module: nn.Module) -> str | None:
    if _gated_layer(module) is None:
        activation = _activation(module)
        name = getattr(activation, "__name__", type(activation).__name__)
        return f"its activation is {name}, the kernels have silu and gelu (tanh)"
    return None


def _refuse_gated(module: nn.Module) -> str | None:
    names = ("w1", "w3") if hasattr(module, "w1") else ("gate_proj", "up_proj")
    sizes = [getattr(getattr(module, name), "out_features", None) for name in names]
    if sizes[0] != sizes[1]:
        return f"{names[0]} gives {sizes[0]} values and {names[1]} {sizes[1]}"
    return _refuse_activation(module)


def _refuse_sparse(module: Gemma3nTextMLP) -> str | None:
    if module.activation_sparsity > 0:
        return f"it keeps the largest gates only (activation_sparsity is {module.activation_sparsity})"
    return _refuse_gated(module)


def _refuse_dropout(module: T5GemmaMLP) -> str | None:
    if module.dropout.p > 0:
        return f"it drops out between the product and down_proj (p is {module.dropout.p})"
    return _refuse_gated(module)


def _gated(module: type[nn.Module], refuse: Callable = _refuse_gated) -> Reference:
    return Reference(module, tuple(_KERNELS), refuse, _gated_layer)


def _fused(module: type[nn.Module]) -> Reference:
    return Reference(module, tuple(f"Fused{layer}" for layer in _KERNELS), _refuse_activation, _fused_layer)


MLPS = (
    _gated(LlamaMLP),
    _gated(Qwen2_5_VLMLP),
    _gated(RecurrentGemmaMlp),
    _gated(Gemma3nTextMLP, _refuse_sparse),
    _gated(T5GemmaMLP, _refuse_dropout),
    _gated(Llama4TextMLP),
    _gated(Lfm2MLP),
    _gated(MixtralBlockSparseTop2MLP),
    _fused(Phi3MLP),
    _fused(GraniteMoeSharedMLP),
)
