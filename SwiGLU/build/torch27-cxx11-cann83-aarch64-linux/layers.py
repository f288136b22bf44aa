"""Layers whose forward `kernels` binds to the MLPs of transformers. They read the projections of what they replace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .distributed import is_distributed
from .functional import geglu_of, swiglu_of
from .operators import GEGLU, SWIGLU, GatedUnit
from .packing import project, separate
from .training import PackedMLP, trains_whole

# gate, up, down
_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
# gate and up in one, down
_FUSED_NAMES = (("gate_up_proj", "down_proj"), ("input_linear", "output_linear"))


class _Layer(nn.Module):
    can_torch_compile = True
    has_backward = True


class SwiGLUMLP(_Layer):
    """``down(silu(gate(x)) * up(x))``, as in Llama: one product for gate and up where their weights are packed.

    Two under ``torch.compile``, which does not see how weights lie.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _gated(self, SWIGLU, swiglu_of, hidden_states)


class GeGLUMLP(_Layer):
    """``down(gelu_tanh(gate(x)) * up(x))``, as in Gemma."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _gated(self, GEGLU, geglu_of, hidden_states)


class FusedSwiGLUMLP(_Layer):
    """``down(silu(gate) * up)`` with ``gate, up = gate_up(x).chunk(2, -1)``, as in Phi-3 and GLM-4."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_up, down = _members(self, _FUSED_NAMES)
        return down(swiglu_of(gate_up(hidden_states)))


class FusedGeGLUMLP(_Layer):
    """``down(gelu_tanh(gate) * up)`` with ``gate, up = gate_up(x).chunk(2, -1)``."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate_up, down = _members(self, _FUSED_NAMES)
        return down(geglu_of(gate_up(hidden_states)))


def projections(mlp: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """The projections for gate, up and down of an MLP that has three."""
    return _members(mlp, _NAMES)


def _gated(mlp: nn.Module, unit: GatedUnit, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    gate, up, down = projections(mlp)
    if torch.compiler.is_compiling() or is_distributed(x) or separate(gate, up) is not None:
        return down(function(gate(x), up(x)))
    if trains_whole(gate, up, down, x):
        a, b, c = gate._parameters, up._parameters, down._parameters
        return PackedMLP.apply(unit, x, a["weight"], b["weight"], c["weight"], a["bias"], b["bias"], c["bias"])
    return down(function(project(gate, up, x)))


def _members(mlp: nn.Module, choices: tuple[tuple[str, ...], ...]) -> tuple:
    modules = mlp._modules
    for names in choices:
        if names[0] in modules:
            return tuple([modules[name] for name in names])
    expected = " or ".join(", ".join(names) for names in choices)
    raise AttributeError(f"{type(mlp).__name__} has none of the projections that this layer reads: {expected}")
