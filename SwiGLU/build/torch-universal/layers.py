"""Layers whose forward `kernels` binds to the MLPs of transformers. They read the members of what they replace.

The activation of an MLP is looked at in every forward. Layers whose name says what it is compute that, and call any
other; the rest take whichever of SiLU and GELU the MLP has.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._common.modules import Layer as _Layer
from ._common.modules import has_hooks
from .mlp_forward import (
    activate,
    clamped_intermediate_states,
    find_unit,
    fused_mlp_forward,
    intermediate_states,
    mlp_forward,
    scaled_intermediate_states,
)
from .operators import EXACT_GEGLU, EXACT_GEGLU_GATE_LAST, GEGLU, GEGLU_GATE_LAST, SWIGLU
from .packing import projections


class SwiGLUMLP(_Layer):
    """Computes ``down(silu(gate(x)) * up(x))``, as Llama does: ``[..., H]`` to ``[..., H]``.

    Gate and up are one product where their weights are packed, and two under ``torch.compile``, which does not see how
    weights lie.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        return mlp_forward(self, hidden_states, SWIGLU)


class GeGLUMLP(_Layer):
    """Computes ``down(gelu_tanh(gate(x)) * up(x))``, as Gemma does. What is said of :class:`SwiGLUMLP` holds."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return mlp_forward(self, hidden_states, GEGLU)


class ExactGeGLUMLP(_Layer):
    """Computes ``down(gelu(gate(x)) * up(x))``, as Pixtral does. What is said of :class:`SwiGLUMLP` holds."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return mlp_forward(self, hidden_states, EXACT_GEGLU)


class FusedSwiGLUMLP(_Layer):
    """Computes ``down(silu(gate) * up)`` with ``gate, up = gate_up(x).chunk(2, -1)``, as Phi-3 and GLM-4 do."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return fused_mlp_forward(self, hidden_states, SWIGLU)


class FusedGeGLUMLP(_Layer):
    """Computes ``down(gelu_tanh(gate) * up)`` with ``gate, up = gate_up(x).chunk(2, -1)``.

    An MLP with a member ``gate_is_last`` that is true has them in the other order.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        is_last = self.__dict__.get("gate_is_last", False)
        return fused_mlp_forward(self, hidden_states, GEGLU_GATE_LAST if is_last else GEGLU)


class FusedExactGeGLUMLP(_Layer):
    """Computes ``down(gelu(gate) * up)``. What is said of :class:`FusedGeGLUMLP` holds."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        is_last = self.__dict__.get("gate_is_last", False)
        return fused_mlp_forward(self, hidden_states, EXACT_GEGLU_GATE_LAST if is_last else EXACT_GEGLU)


class ClampedSwiGLUMLP(_Layer):
    """Computes ``down(silu(min(gate(x), limit)) * clamp(up(x), -limit, limit))``, as DeepSeek-V4 and GLM-5 do."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        members = self.__dict__
        limit = members["limit"] if "limit" in members else members["swiglu_limit"]
        return projections(self)[2](clamped_intermediate_states(self, limit, hidden_states))


class ScaledSwiGLUMLP(_Layer):
    """Computes ``down(silu(gate(x) * gate_multiplier) * up(x)) * down_multiplier``, as Falcon-H1 does."""

    def forward(self, x: Tensor) -> Tensor:
        hidden_states, factor = scaled_intermediate_states(self, self.gate_multiplier, x)
        down = projections(self)[2]
        if factor != 1 and getattr(down, "bias", None) is not None:
            hidden_states, factor = hidden_states * factor, 1.0
        return down(hidden_states) * (factor * self.down_multiplier)


class DropoutMLP(_Layer):
    """Computes ``down(dropout(act(gate(x)) * up(x)))``, as T5 and T5Gemma do.

    T5's projections are ``wi_0``, ``wi_1`` and ``wo``, which may stay in float32 and gets what it multiplies with so.
    """

    def forward(self, hidden_states: Tensor) -> Tensor:
        down, dropout = projections(self)[2], self._modules["dropout"]
        dtype = _weight_dtype(down) if "wi_0" in self._modules else None
        if not _has_to_be_called(dropout) and (dtype is None or dtype == hidden_states.dtype):
            unit = find_unit(self)
            if unit is not None:
                return mlp_forward(self, hidden_states, unit)
        hidden_states = dropout(intermediate_states(self, hidden_states))
        if dtype is not None and hidden_states.dtype != dtype:
            hidden_states = hidden_states.to(dtype)
        return down(hidden_states)


class FusedDropoutMLP(_Layer):
    """Computes ``Wo(drop(act(gate) * up))`` with ``gate, up = Wi(x).chunk(2, -1)``, as ModernBERT does."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.Wo(self.drop(activate(self, self.Wi(hidden_states))))


class DroppedMLP(_Layer):
    """Computes ``dropout(down(act(gate(x)) * up(x)))``, as Seed-OSS does."""

    def forward(self, x: Tensor) -> Tensor:
        y, p = mlp_forward(self, x, find_unit(self)), self.residual_dropout
        return F.dropout(y, p) if self.training and p else y


class GloballyScaledMLP(_Layer):
    """Computes ``down(act(gate(x)) * up(x)) * global_scale``, as Inkling does."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return mlp_forward(self, hidden_states, find_unit(self)) * self.global_scale


class NormedMLP(_Layer):
    """Computes ``down(ffn_sub_norm(act(gate(x)) * up(x)))``, as BitNet does."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.ffn_sub_norm(intermediate_states(self, x)))


class FusedMLPByLayer(_Layer):
    """Computes ``fc2(act(gate) * up)`` with gate and up from ``fc1``, as Moshi does. A layer may choose its weights."""

    def forward(self, hidden_states: Tensor, layer_idx: int | None = None) -> Tensor:
        which = () if layer_idx is None else (layer_idx,)
        return self.fc2(activate(self, self.fc1(hidden_states, *which)), *which)


class FusedAdaptedMLP(_Layer):
    """Computes ``down(act(gate) * up)`` of a product with an adapter of the layer added, as Zamba 2 does."""

    def forward(self, hidden_state: Tensor, layer_idx: int | None = None) -> Tensor:
        adapter = self.gate_up_proj_adapter_list[self.layer_dic[layer_idx]]
        gate_up = self.gate_up_proj(hidden_state) + adapter(hidden_state)
        return self.down_proj(activate(self, gate_up))


def _has_to_be_called(dropout: nn.Module) -> bool:
    """Tell whether a dropout changes something now, is of another class, or has hooks."""
    return type(dropout) is not nn.Dropout or (dropout.training and dropout.p > 0) or has_hooks(dropout)


def _weight_dtype(linear: nn.Module) -> torch.dtype | None:
    """Return the dtype of a weight if it is a floating one. One that is parametrized is not computed for that."""
    for members in (linear._parameters, linear._buffers, linear.__dict__):
        if "weight" in members:
            weight = members["weight"]
            break
    else:
        weight = next(linear.parameters(), None)  # the first of those that it is computed from
    return weight.dtype if weight is not None and weight.is_floating_point() else None
