"""Layers whose forward `kernels` binds to the MLPs of transformers. They read the projections of what they replace."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .activations import passed_over
from .distributed import is_distributed
from .functional import geglu_of, swiglu_of
from .operators import GEGLU, SWIGLU, GatedUnit
from .packing import TWO_PROJECTIONS, projections, separate
from .projecting import project
from .training import PackedMLP, trains_whole
from .transforms import is_transformed


class _Layer(nn.Module):
    """Says of all layers what `kernels` wants to know of them; it allows no members beyond these two."""

    can_torch_compile = True
    has_backward = True


class SwiGLUMLP(_Layer):
    """Computes ``down(silu(gate(x)) * up(x))``, as Llama does: ``[..., H]`` to ``[..., H]``.

    Gate and up are one product where their weights are packed, and two under ``torch.compile``, which does not see how
    weights lie.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _gated(self, SWIGLU, swiglu_of, hidden_states)


class GeGLUMLP(_Layer):
    """Computes ``down(gelu_tanh(gate(x)) * up(x))``, as Gemma does. What is said of :class:`SwiGLUMLP` holds."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _gated(self, GEGLU, geglu_of, hidden_states)


class FusedSwiGLUMLP(_Layer):
    """Computes ``down(silu(gate) * up)`` with ``gate, up = gate_up(x).chunk(2, -1)``, as Phi-3 and GLM-4 do."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _halved(self, SWIGLU, swiglu_of, hidden_states)


class FusedGeGLUMLP(_Layer):
    """Computes ``down(gelu_tanh(gate) * up)`` with ``gate, up = gate_up(x).chunk(2, -1)``."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return _halved(self, GEGLU, geglu_of, hidden_states)


def _halved(mlp: nn.Module, unit: GatedUnit, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Compute an MLP with two projections."""
    gate_up, down = projections(mlp, TWO_PROJECTIONS)
    if (activation := passed_over(mlp, unit)) is not None:
        gate, up = gate_up(x).chunk(2, -1)
        return down(activation(gate) * up)
    return down(function(gate_up(x)))


def _gated(mlp: nn.Module, unit: GatedUnit, function: Callable[..., Tensor], x: Tensor) -> Tensor:
    """Compute an MLP with three projections: as one node of autograd, with one product, or with two."""
    gate, up, down = projections(mlp)
    if (activation := passed_over(mlp, unit)) is not None:
        return down(activation(gate(x)) * up(x))
    if torch.compiler.is_compiling() or is_transformed() or is_distributed(x) or separate(gate, up) is not None:
        return down(function(gate(x), up(x)))
    if trains_whole(gate, up, down, x):
        a, b, c = gate._parameters, up._parameters, down._parameters
        return PackedMLP.apply(unit, x, a["weight"], b["weight"], c["weight"], a["bias"], b["bias"], c["bias"])
    return down(function(project(gate, up, x), is_plain=True))
