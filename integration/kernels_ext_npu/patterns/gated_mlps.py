"""The gated MLPs of transformers, and on which instances the kernels serve them: the activation of one decides."""

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers.activations import ACT2FN

from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.patterns.pattern import Pattern, misread, patterns_for, require, reworded

ACTIVATED_BY: dict[str, Callable[[Tensor], Tensor]] = {
    "SwiGLUMLP": F.silu,
    "GeGLUMLP": partial(F.gelu, approximate="tanh"),
    "ExactGeGLUMLP": F.gelu,
}
# in the order in which the kernel looks for them: those of gate, up and down; of both and down; and the activation
_THREE_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo"))
_TWO_PROJECTIONS = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"), ("Wi", "Wo"), ("fc1", "fc2"))
_ACTIVATIONS = ("act_fn", "activation_fn", "activation", "act")
GATED = tuple(ACTIVATED_BY)
FUSED = tuple(f"Fused{layer}" for layer in GATED)


class MLP(nn.Module):
    """Members with the names that transformers gives them, of those that the forward of a class reads."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, hidden_act: str = "silu", bias: bool = False, p: float = 0.1
    ) -> None:
        super().__init__()
        made: dict[str, Callable[[], Any]] = {
            "gate_proj up_proj w1 w3 wi_0 wi_1": lambda: nn.Linear(hidden_size, intermediate_size, bias=bias),
            "gate_up_proj Wi fc1": lambda: nn.Linear(hidden_size, 2 * intermediate_size, bias=bias),
            "down_proj w2 wo Wo fc2": lambda: nn.Linear(intermediate_size, hidden_size, bias=bias),
            "act_fn activation_fn act": lambda: ACT2FN[hidden_act],
            "dropout drop": lambda: nn.Dropout(p),
            "ffn_sub_norm": lambda: nn.RMSNorm(intermediate_size),
            "global_scale": lambda: nn.Parameter(torch.ones(1)),
            "limit": lambda: 1.0,
        }
        for names, make in made.items():
            for name in names.split():
                if name in type(self).forward.__code__.co_names:
                    setattr(self, name, make())


class LlamaMLP(MLP):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


_LFM2 = {"self.act_fn": "F.silu", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
Lfm2MLP = reworded("Lfm2MLP", LlamaMLP, _LFM2)


class RecurrentGemmaMlp(MLP):
    def forward(self, hidden_states):
        gate = self.act_fn(self.gate_proj(hidden_states))
        return self.down_proj(gate * self.up_proj(hidden_states))


class Gemma3nTextMLP(MLP):
    """The MLP that in some layers sets all but the largest gates to zero: these are not served."""

    def forward(self, hidden_states):
        gate_proj = self.gate_proj(hidden_states)
        if self.activation_sparsity > 0.0:
            gate_proj = self._gaussian_topk(gate_proj)
        activations = self.act_fn(gate_proj)
        up_proj = self.up_proj(hidden_states)
        return self.down_proj(activations * up_proj)


class BeamMLP(MLP):
    """The MLP that multiplies in float32, as the kernel does for all of them."""

    def forward(self, x):
        gate = self.gate_proj(x)
        up = self.up_proj(x)
        activated = (self.act_fn(gate.float()) * up.float()).to(gate.dtype)
        return self.down_proj(activated)


class Llama4TextMLP(MLP):
    def forward(self, x):
        down_proj = self.activation_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(down_proj)


# the expert of Mixtral in transformers 4, where each is a module of its own
_MIXTRAL = {"activation_fn": "act_fn", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
MixtralBlockSparseTop2MLP = reworded("MixtralBlockSparseTop2MLP", Llama4TextMLP, _MIXTRAL)


class Phi3MLP(MLP):
    """The MLP with gate and up in one projection, the gate first."""

    def forward(self, hidden_states):
        up_states = self.gate_up_proj(hidden_states)
        gate, up_states = up_states.chunk(2, dim=-1)
        up_states = up_states * self.activation_fn(gate)
        return self.down_proj(up_states)


class GraniteMoeSharedMLP(MLP):
    def forward(self, hidden_states):
        hidden_states = self.input_linear(hidden_states)
        chunked_hidden_states = hidden_states.chunk(2, dim=-1)
        hidden_states = self.activation(chunked_hidden_states[0]) * chunked_hidden_states[1]
        return self.output_linear(hidden_states)


def activation_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the activation of an instance, which transformers sets from the config.

    Lfm2 has none: its forward says silu.
    """
    name = _named_activation(type(module).forward)
    return F.silu if name is None else getattr(module, name)


@cache
def _named_activation(forward: FunctionType) -> str | None:
    """Return the activation that a forward names; None if it names none."""
    return next((name for name in _ACTIVATIONS if name in forward.__code__.co_names), None)


def activated_layer(module: nn.Module) -> str | None:
    """Return the layer with the activation of an instance; None if no layer has it.

    It is told by its values: many classes have one formula.
    """
    activation = activation_function(module)
    if isinstance(activation, nn.Module) and any(True for _ in (*activation.parameters(), *activation.buffers())):
        return None
    with _disable_current_modes(), torch.no_grad():  # with fake tensors there would be no values
        grid = torch.linspace(-9, 9, 181, device="cpu")
        try:
            values = getattr(activation, "forward", activation)(grid.clone())  # not its hooks
        except Exception:  # it wants something else than one tensor on the CPU
            return None
        for layer, kernel in ACTIVATED_BY.items():
            # float32 leaves 1e-6 between two ways to compute tanh; GELU and its form with tanh are 4e-4 apart
            if isinstance(values, Tensor) and torch.allclose(values, kernel(grid), rtol=0, atol=1e-5):
                return layer
    return None


def gated_layer(module: nn.Module) -> str:
    """Return which of GATED serves an instance, or would if it had its activation."""
    return activated_layer(module) or GATED[0]


def refuse_activation(module: nn.Module) -> str | None:
    named = _named_activation(type(module).forward)
    places = module._modules, vars(module)  # in the order in which the kernel looks
    held = [name for members in places for name in _ACTIVATIONS if name in members]
    taken = held[0] if held else None
    if taken != named:
        return misread(taken, named)
    activation = activation_function(module)
    if has_hooks(activation):
        return "hooks watch its activation, which the kernel does not call"
    if activated_layer(module) is None:
        name = getattr(activation, "__name__", type(activation).__name__)
        return f"its activation is {name}, the kernels have silu and gelu"
    return None


def refuse_gated(module: nn.Module) -> str | None:
    if (reason := _refuse_projections(module, _THREE_PROJECTIONS)) is not None:
        return reason
    names = _named_projections(type(module).forward, _THREE_PROJECTIONS)
    sizes = [getattr(module._modules[name], "out_features", None) for name in names]
    if sizes[0] != sizes[1]:
        return f"{names[0]} gives {sizes[0]} values and {names[1]} {sizes[1]}"
    return refuse_activation(module)


def refuse_fused(module: nn.Module) -> str | None:
    return _refuse_projections(module, _TWO_PROJECTIONS) or refuse_activation(module)


def _refuse_projections(module: nn.Module, groups: tuple[tuple[str, ...], ...]) -> str | None:
    """Return why the kernel would not take the projections that a forward names; None if it does."""
    named, held = _named_projections(type(module).forward, groups), module._modules
    taken = [group for group in groups if group[0] in held]
    if taken[:1] != [named]:
        return misread(taken[0][0] if taken else None, named[0])
    missing = [name for name in named if name not in held]
    return misread(None, missing[0]) if missing else None


def projection_names(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of gate, up and down in a class whose forward is that of a gated MLP with three projections."""
    return _named_projections(cls.forward, _THREE_PROJECTIONS)  # type: ignore[arg-type]


@cache
def _named_projections(forward: FunctionType, groups: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return next(group for group in groups if group[0] in forward.__code__.co_names)


def _is_dense(module: Any) -> bool:
    return module.activation_sparsity <= 0


_DENSE = require(
    _is_dense,
    "it keeps the largest gates only (activation_sparsity is {0.activation_sparsity})",
    refuse_gated,
)
PATTERNS = (
    *patterns_for(GATED, LlamaMLP, RecurrentGemmaMlp, limits=refuse_gated, choose=gated_layer),
    Pattern(Gemma3nTextMLP, GATED, _DENSE, gated_layer, holds=_is_dense),
    *patterns_for(
        GATED, BeamMLP, Llama4TextMLP, Lfm2MLP, MixtralBlockSparseTop2MLP, limits=refuse_gated, choose=gated_layer
    ),
    *patterns_for(FUSED, Phi3MLP, GraniteMoeSharedMLP, limits=refuse_fused, choose=lambda m: f"Fused{gated_layer(m)}"),
)
