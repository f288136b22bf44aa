"""How the layers compute an MLP: with which gated unit, in how many products, and in how many nodes of autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .activations import activation_to_call
from .functional import apply_clamped_swiglu, apply_unit, takes_scaled
from .operators import EXACT_GEGLU, GEGLU, NO_LIMIT, SWIGLU, GatedUnit, clipped_swiglu_fused
from .packed_mlp import PackedMLP, trains_as_one_node
from .packed_projection import project
from .packing import TWO_PROJECTIONS, projections, separate

# attribute of the forward of a gate: a function that computes gate and up together, of both and their input
_TOGETHER = "_kernels_ext_npu_together"


def mlp_forward(mlp: nn.Module, x: Tensor, unit: GatedUnit | None) -> Tensor:
    """Compute an MLP with three projections: as one node of autograd, with one product, or with two.

    Without a unit the activation of the MLP is called.
    """
    gate, up, down = projections(mlp)
    if unit is None:
        return down(intermediate_states(mlp, x))
    if (activation := activation_to_call(mlp, unit)) is not None:
        return down(activation(gate(x)) * up(x))
    if _needs_two_products(gate, up, x):
        return down(apply_unit(unit, *_project_both(gate, up, x)))
    if torch.is_grad_enabled() and trains_as_one_node(gate, up, down, x):
        a, b, c = gate._parameters, up._parameters, down._parameters
        return PackedMLP.apply(unit, x, a["weight"], b["weight"], c["weight"], a["bias"], b["bias"], c["bias"])
    return down(apply_unit(unit, project(gate, up, x), is_plain=True))


def fused_mlp_forward(mlp: nn.Module, x: Tensor, unit: GatedUnit) -> Tensor:
    """Compute an MLP with two projections, the first of which gives gate and up in the order of the unit."""
    gate_up, down = projections(mlp, TWO_PROJECTIONS)
    if (activation := activation_to_call(mlp, unit)) is not None:
        gate, up = unit.halves(gate_up(x))
        return down(activation(gate) * up)
    return down(apply_unit(unit, gate_up(x)))


def find_unit(mlp: nn.Module) -> GatedUnit | None:
    """Return the unit that computes the activation which an MLP has now; None if that has to be called.

    While a graph is captured no values can be looked at: an activation whose class is not known yet is called.
    """
    for unit in (SWIGLU, GEGLU, EXACT_GEGLU):
        if activation_to_call(mlp, unit) is None:
            return unit
    return None


def intermediate_states(mlp: nn.Module, x: Tensor) -> Tensor:
    """Compute ``act(gate(x)) * up(x)`` of an MLP with three projections, ``[..., I]``."""
    gate, up, _ = projections(mlp)
    return _apply_to_projections(_gated_activation(mlp), gate, up, x)


def activate(mlp: nn.Module, gate_up: Tensor) -> Tensor:
    """Compute ``act(gate) * up`` with the activation that an MLP has now, of both in one tensor, the gate first."""
    return _gated_activation(mlp)(gate_up)


def clamped_intermediate_states(mlp: nn.Module, limit: float, x: Tensor) -> Tensor:
    """Compute ``silu(min(gate(x), limit)) * clamp(up(x), -limit, limit)`` of an MLP with three projections."""
    gate, up, _ = projections(mlp)
    if (activation := activation_to_call(mlp, SWIGLU)) is not None:
        return activation(gate(x).clamp(max=limit)) * up(x).clamp(-limit, limit)
    return _apply_to_projections(partial(apply_clamped_swiglu, limit=limit), gate, up, x)


def scaled_intermediate_states(mlp: nn.Module, factor: float, x: Tensor) -> tuple[Tensor, float]:
    """Compute ``silu(factor * gate(x)) * up(x)`` of an MLP with three projections.

    That is ``factor`` times ``gate * sigmoid(factor * gate) * up``, which ``npu_clipped_swiglu`` computes where it has
    nothing to clip.

    Returns:
        ``[..., I]``, and what it has still to be multiplied with.
    """
    gate, up, _ = projections(mlp)
    if (activation := activation_to_call(mlp, SWIGLU)) is not None:
        return activation(gate(x) * factor) * up(x), 1.0
    if _needs_two_products(gate, up, x):
        return F.silu(gate(x) * factor) * up(x), 1.0
    product = project(gate, up, x)
    if takes_scaled(product):
        return clipped_swiglu_fused(product, factor, NO_LIMIT), factor
    a, b = product.chunk(2, -1)
    return F.silu(a * factor) * b, 1.0


def _apply_to_projections(function: Callable[..., Tensor], gate: nn.Module, up: nn.Module, x: Tensor) -> Tensor:
    """Compute a function of what two projections give, in one tensor if their weights are packed."""
    both = _project_both(gate, up, x) if _needs_two_products(gate, up, x) else (project(gate, up, x), None)
    return function(*both)


def _project_both(gate: nn.Module, up: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Call two projections, both at once where whoever gave the first its forward can do that.

    Returns:
        What they give, or one tensor ``[..., 2·I]``, the gate first, and None.
    """
    together = None if torch.compiler.is_compiling() else getattr(vars(gate).get("forward"), _TOGETHER, None)
    found = None if together is None else together(gate, up, x)
    return (gate(x), up(x)) if found is None else found


def _needs_two_products(gate: nn.Module, up: nn.Module, x: Tensor) -> bool:
    """Tell whether two projections have to be called one after the other."""
    return torch.compiler.is_compiling() or is_transformed() or is_distributed(x) or separate(gate, up) is not None


def _gated_activation(mlp: nn.Module) -> Callable[..., Tensor]:
    """Return what computes ``act(gate) * up``, of two tensors or of one, with the activation that an MLP has now."""
    unit = find_unit(mlp)
    return partial(_call_activation, mlp) if unit is None else partial(apply_unit, unit)


def _call_activation(mlp: nn.Module, gate: Tensor, up: Tensor | None = None) -> Tensor:
    activation = activation_to_call(mlp, SWIGLU)
    assert activation is not None
    if up is None:
        gate, up = gate.chunk(2, -1)
    return activation(gate) * up
