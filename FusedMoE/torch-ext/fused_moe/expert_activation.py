"""What lies between the two products of an expert: SwiGLU, its relatives and GEGLU in one launch, the rest as given.

Which gate a module of transformers has is told by its values: many classes have one formula, and what it depends on are
attributes of the instance.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ._common.clipped import (
    clipped_swiglu_gradient,
    clipped_swiglu_in_torch,
    geglu_grad,
    has_clipped_gradient,
    has_clipped_swiglu,
    launch_clipped_swiglu,
)
from ._common.derivatives import by_formula, gradients
from ._common.modules import has_hooks

_ALIGNMENT = 64  # bytes of a half that npu_swiglu_backward takes: CANN, aclnnSwiGluGrad
_KNOWN = "_fused_moe_gate"  # where a module keeps what its gate was found to be
_UP_OFFSETS = (0.0, 1.0)
_TANH, _ACTIVATE_LEFT = 1, True  # torch_npu's defaults are tanh and the right half


class Gate(NamedTuple):
    """Describes ``g · sigmoid(alpha · g) · (u + offset)`` with ``g`` at most ``limit`` and ``u`` within ``±limit``.

    A gate takes the product of gate and up, ``[M, 2·I]`` of a floating dtype, and gives ``[M, I]``. clipped.py says
    where the formula comes from.

    Attributes:
        alpha: the factor inside of the sigmoid; 1 makes it SiLU.
        limit: where gate and up are clipped; infinite for SwiGLU.
        offset: what is added to ``u``.
        interleaved: whether gate and up alternate; otherwise the gate is the first half.
        gelu: whether it is ``gelu(g) · u`` instead, with the tanh formula and the gate in the first half; then nothing
            else may be said.
    """

    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0
    interleaved: bool = False
    gelu: bool = False

    @property
    def is_swiglu(self) -> bool:
        """Tell whether it is SwiGLU."""
        return self == SWIGLU

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Compute ``[M, I]`` of ``[M, 2·I]`` in torch, differentiable."""
        if self.is_swiglu:
            gate, up = gate_up.chunk(2, -1)
            return nn.functional.silu(gate) * up
        if self.gelu:
            gate, up = gate_up.chunk(2, -1)
            return nn.functional.gelu(gate, approximate="tanh") * up
        return clipped_swiglu_in_torch(gate_up, self.alpha, self.limit, self.offset, self.interleaved)

    def fits(self, gate_up_size: int, dtype: torch.dtype, trains: bool = True) -> bool:
        """Tell whether torch_npu has an operator for ``[M, gate_up_size]``, and for its gradient if it trains."""
        is_aligned = gate_up_size // 2 * dtype.itemsize % _ALIGNMENT == 0
        if self.is_swiglu or self.gelu:
            return is_aligned or not trains
        return has_clipped_swiglu() and (not trains or (is_aligned and has_clipped_gradient(self.alpha, self.limit)))

    def forward(self, gate_up: Tensor) -> Tensor:
        """Compute ``[M, I]`` of ``[M, 2·I]`` in one launch, without a gradient.

        That is in float32 inside, and rounded once; but in float16 the operator rounds the GELU before it multiplies.
        """
        if self.is_swiglu:
            return torch.ops.npu.npu_swiglu(gate_up, -1)
        if self.gelu:
            return torch.ops.npu.npu_geglu(gate_up, -1, _TANH, _ACTIVATE_LEFT)[0]
        return launch_clipped_swiglu(gate_up, self.alpha, self.limit, self.offset, self.interleaved)

    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """Return the gradient of ``gate_up``, ``[M, 2·I]``, from that of the result, ``[M, I]``."""
        if self.is_swiglu:
            return torch.ops.npu.npu_swiglu_backward(grad, gate_up, -1)
        if self.gelu:
            gelu = torch.ops.npu.npu_geglu(gate_up, -1, _TANH, _ACTIVATE_LEFT)[1]  # computed again
            return geglu_grad(grad, gate_up, gelu, _TANH, _ACTIVATE_LEFT)
        return clipped_swiglu_gradient(grad, gate_up, self.alpha, self.limit, self.offset, self.interleaved)


SWIGLU = Gate()
GEGLU = Gate(gelu=True)


class GateFunction(torch.autograd.Function):
    """Applies a gate in one launch, and is differentiable: ``apply(gate, gate_up)``."""

    @staticmethod
    def forward(ctx, gate: Gate, gate_up: Tensor) -> Tensor:
        ctx.gate = gate
        ctx.save_for_backward(gate_up)
        return gate.forward(gate_up)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        (gate_up,) = ctx.saved_tensors
        if by_formula(grad):
            return None, gradients(ctx.gate, (gate_up,), (True,), grad)[0]  # type: ignore[return-value]
        return None, ctx.gate.backward(grad.contiguous(), gate_up)


Activation = Gate | Callable[[Tensor], Tensor]


def recognised_activation(experts: nn.Module) -> Activation:
    """Return what an experts module of transformers computes between its products.

    The first call for a module evaluates its gate on a few numbers on the host, and the module remembers what it was,
    as long as its class has the same gate, its activation is of the same class, and its numbers are the same. Whoever
    changes what else decides calls :func:`forget`, and :func:`is_current` tells whether anybody has. While a graph is
    captured there is no time for that: a module that is seen there first computes its gate in torch, and so does one
    with a gate of its own, or whose activation has hooks.

    Args:
        experts: a module with transformers' experts interface.

    Returns:
        A :class:`Gate` where it has the module's values; otherwise ``_apply_gate`` of the module, or ``act_fn`` of one
        that does not gate.
    """
    if not experts.has_gate:
        return experts.act_fn
    attributes, modules = experts.__dict__, experts._modules
    if "_apply_gate" in attributes:  # somebody has given the module one of its own
        return experts._apply_gate
    kind: object = None
    if "act_fn" in modules:
        activation = modules["act_fn"]
        if has_hooks(activation):
            return experts._apply_gate
        forward, members = type(activation).forward, activation.__dict__
        kind = f"{type(activation).__qualname__}", _source(forward)  # somebody may have replaced the forward
        if "forward" in members:  # `kernels` binds that of the class
            own = members["forward"]
            if type(own) is not MethodType or own.__func__ is not forward:
                kind = kind, repr(own)  # which may hand over to that of the class
    elif "act_fn" in attributes:  # somebody has made it a function
        kind = repr(attributes["act_fn"])
    kind = kind, _source(type(experts)._apply_gate)
    known = getattr(experts, _KNOWN, None)
    is_known = known is not None and known[2] == kind
    for name, number in known[0][0] if is_known else ():
        is_known &= attributes.get(name) == number
    if not is_known:
        if torch.compiler.is_compiling():
            return experts._apply_gate
        # the module may be saved as a whole: no class
        known = _read_by_gate(experts), tuple(_recognise(experts) or ()), kind
        setattr(experts, _KNOWN, known)
    return Gate(*known[1]) if known[1] else experts._apply_gate


def _source(function: Callable) -> object:
    """Return where a function is written, or how it shows itself.

    A graph finds no qualified name of a function equal to itself, and no class may be saved with a module.
    """
    code = function.__code__ if type(function) is FunctionType else None
    return repr(function) if code is None else (code.co_filename, code.co_firstlineno)


def is_current(experts: nn.Module) -> bool:
    """Tell whether a module is as it was when its activation was recognised, or has not been looked at."""
    known = getattr(experts, _KNOWN, None)
    return known is None or known[0] == _read_by_gate(experts)


def forget(experts: nn.Module) -> None:
    """Take away from a module what :func:`recognised_activation` found its gate to be, so that it looks again."""
    vars(experts).pop(_KNOWN, None)


def _read_by_gate(experts: nn.Module) -> tuple[object, ...]:
    """Return what decides on a gate: the numbers that it may have, its activation, and the function itself.

    Of integers and flags, which those who shard modules set too, these are the ones that the function names.
    """
    gate = getattr(experts._apply_gate, "__func__", experts._apply_gate)
    named = getattr(getattr(gate, "__code__", None), "co_names", ())
    read = [
        (name, value)
        for name, value in vars(experts).items()
        if isinstance(value, float) or (name in named and (value is None or isinstance(value, (int, str))))
    ]
    return tuple(sorted(read)), repr(getattr(experts, "act_fn", None)), repr(gate)


def _recognise(experts: nn.Module) -> Gate | None:
    """Return the gate that gives the values of a module's own ``_apply_gate``, None where there is none."""
    floats = {value for value in vars(experts).values() if isinstance(value, float)}
    with _disable_current_modes(), torch.no_grad():  # with fake tensors there would be no values
        far = torch.tensor([-1e6, -1e4, -100.0, -30.0, 30.0, 100.0, 1e4, 1e6], device="cpu")  # beyond any limit
        side = torch.cat((torch.linspace(-12, 12, 48, device="cpu"), far))
        pairs = torch.cartesian_prod(side, side)
        others = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0), device="cpu")]
        gate_up = torch.stack((pairs, others), -1).flatten(1)  # halves and neighbours meet in many pairs
        try:
            values = experts._apply_gate(gate_up.clone())
        except Exception:  # it has tensors of its own, on the device or of a certain size
            return None
        candidates = [SWIGLU, GEGLU]
        candidates += [
            Gate(alpha, limit, offset, interleaved)
            for limit in floats
            for alpha in (1.0, *floats)
            for offset in _UP_OFFSETS
            for interleaved in (False, True)
        ]
        same = (c for c in candidates if values.shape == (len(gate_up), 2) and _close(values, c(gate_up)))
        return next(same, None)


def _close(a: Tensor, b: Tensor) -> bool:
    """Tell whether two ways to compute one formula in float32 could have given both."""
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)  # float32 leaves some 1e-6 between them
