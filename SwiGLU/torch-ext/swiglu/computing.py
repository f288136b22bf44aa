"""How the layers compute an MLP: with which gated unit, in how many products, and in how many nodes of autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .activations import is_met, passed_over
from .functional import clamped_swiglu_of, exact_geglu_of, geglu_of, swiglu_of, takes_scaled
from .operators import EXACT_GEGLU, GEGLU, SWIGLU, GatedUnit
from .packing import TWO_PROJECTIONS, projections, separate
from .projecting import project
from .scaled import scaled_swiglu_fused
from .training import PackedMLP, trains_whole

# of the forward of a gate whose owner computes it together with the up: a function of both and their input
_TOGETHER = "_kernels_ext_npu_together"

Function = Callable[..., Tensor]  # of gate and up, or of both as one tensor
Unit = tuple[GatedUnit, Function]

SILU: Unit = (SWIGLU, swiglu_of)
GELU_TANH: Unit = (GEGLU, geglu_of)
GELU: Unit = (EXACT_GEGLU, exact_geglu_of)


def computed(mlp: nn.Module, unit: Unit, x: Tensor) -> Tensor:
    """Compute an MLP with three projections: as one node of autograd, with one product, or with two."""
    gate, up, down = projections(mlp)
    if (activation := passed_over(mlp, unit[0])) is not None:
        return down(activation(gate(x)) * up(x))
    if are_apart(gate, up, x):
        return down(unit[1](*_called_together(gate, up, x)))
    if trains_whole(gate, up, down, x):
        a, b, c = gate._parameters, up._parameters, down._parameters
        return PackedMLP.apply(unit[0], x, a["weight"], b["weight"], c["weight"], a["bias"], b["bias"], c["bias"])
    return down(unit[1](project(gate, up, x), is_plain=True))


def halved(mlp: nn.Module, unit: Unit, x: Tensor) -> Tensor:
    """Compute an MLP with two projections, the gate first."""
    gate_up, down = projections(mlp, TWO_PROJECTIONS)
    if (activation := passed_over(mlp, unit[0])) is not None:
        gate, up = gate_up(x).chunk(2, -1)
        return down(activation(gate) * up)
    return down(unit[1](gate_up(x)))


def unit_of(mlp: nn.Module) -> Unit | None:
    """Return the unit that computes the activation which an MLP has now; None if that has to be called.

    While a graph is captured no values can be looked at: an activation of a class that was not met before is called.
    """
    for unit in (SILU, GELU_TANH, GELU):
        if passed_over(mlp, unit[0]) is None and is_met(mlp, unit[0]):
            return unit
    return None


def activated(mlp: nn.Module, x: Tensor) -> Tensor:
    """Compute ``act(gate(x)) * up(x)`` of an MLP with three projections, ``[..., I]``."""
    gate, up, _ = projections(mlp)
    return of_two(gate, up, x, _function(mlp))


def activated_halves(mlp: nn.Module, x: Tensor) -> Tensor:
    """Compute ``act(gate) * up`` of what one projection gives for both, the gate first."""
    gate_up, _ = projections(mlp, TWO_PROJECTIONS)
    return activated_product(mlp, gate_up(x))


def activated_product(mlp: nn.Module, gate_up: Tensor) -> Tensor:
    """Compute ``act(gate) * up`` of both as one tensor ``[..., 2·I]``, the gate first."""
    return _function(mlp)(gate_up)


def clamped(mlp: nn.Module, limit: float, x: Tensor) -> Tensor:
    """Compute ``silu(min(gate(x), limit)) * clamp(up(x), -limit, limit)`` of an MLP with three projections."""
    gate, up, _ = projections(mlp)
    if (activation := passed_over(mlp, SWIGLU)) is not None:
        return activation(gate(x).clamp(max=limit)) * up(x).clamp(-limit, limit)
    return of_two(gate, up, x, partial(clamped_swiglu_of, limit=limit))


def scaled(mlp: nn.Module, factor: float, x: Tensor) -> tuple[Tensor, float]:
    """Compute ``silu(factor * gate(x)) * up(x)`` of an MLP with three projections.

    Returns:
        ``[..., I]``, and what it has still to be multiplied with.
    """
    gate, up, _ = projections(mlp)
    if (activation := passed_over(mlp, SWIGLU)) is not None:
        return activation(gate(x) * factor) * up(x), 1.0
    if are_apart(gate, up, x):
        return F.silu(gate(x) * factor) * up(x), 1.0
    product = project(gate, up, x)
    if takes_scaled(product):
        return scaled_swiglu_fused(product, factor), factor
    a, b = product.chunk(2, -1)
    return F.silu(a * factor) * b, 1.0


def of_two(gate: nn.Module, up: nn.Module, x: Tensor, function: Function) -> Tensor:
    """Compute a function of what two projections give, as one product if they are packed."""
    if are_apart(gate, up, x):
        return function(*_called_together(gate, up, x))
    return function(project(gate, up, x), None)


def _called_together(gate: nn.Module, up: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Call two projections, both at once where whoever gave the first its forward can do that.

    Returns:
        What they give, or one tensor ``[..., 2·I]``, the gate first, and None.
    """
    together = None if torch.compiler.is_compiling() else getattr(vars(gate).get("forward"), _TOGETHER, None)
    found = None if together is None else together(gate, up, x)
    return (gate(x), up(x)) if found is None else found


def are_apart(gate: nn.Module, up: nn.Module, x: Tensor) -> bool:
    """Tell whether two projections have to be called one after the other."""
    return torch.compiler.is_compiling() or is_transformed() or is_distributed(x) or separate(gate, up) is not None


def _function(mlp: nn.Module) -> Function:
    """Return what computes ``act(gate) * up`` with the activation that an MLP has now."""
    unit = unit_of(mlp)
    return partial(_called, mlp) if unit is None else unit[1]


def _called(mlp: nn.Module, gate: Tensor, up: Tensor | None = None) -> Tensor:
    activation = passed_over(mlp, SWIGLU)
    assert activation is not None
    if up is None:
        gate, up = gate.chunk(2, -1)
    return activation(gate) * up


def drops(module: nn.Module) -> bool:
    """Tell whether a dropout has to be called: it changes something now, or somebody watches it."""
    members = module.__dict__
    return (
        type(module) is not nn.Dropout
        or (module.training and module.p > 0)
        or bool(members["_forward_hooks"] or members["_forward_pre_hooks"])
        or bool(members["_backward_hooks"] or members["_backward_pre_hooks"])
    )


def dropped(x: Tensor, p: float, training: bool) -> Tensor:
    """Drop out values, where that is asked for at all."""
    return F.dropout(x, p, training) if training and p else x
