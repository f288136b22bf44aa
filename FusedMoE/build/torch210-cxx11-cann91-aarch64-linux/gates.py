"""What lies between the two products of an expert: SwiGLU and its clipped relatives in one launch, the rest as given.

A gate is told by its values: many classes have one formula, and what it depends on are attributes of the instance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

_ALIGNMENT = 64  # bytes of a half that npu_swiglu_backward takes: CANN, aclnnSwiGluGrad
_KNOWN = "_fused_moe_gate"  # where a module keeps what its gate was found to be
_UP_OFFSETS = (0.0, 1.0)


class Gate(NamedTuple):
    """``g · sigmoid(alpha · g) · (u + offset)`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.

    Attributes:
        alpha: 1 makes it SiLU.
        limit: infinite for SwiGLU.
        offset: what is added to ``u``.
        interleaved: whether gate and up alternate; otherwise the gate is the first half.
    """

    alpha: float = 1.0
    limit: float = float("inf")
    offset: float = 0.0
    interleaved: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is SwiGLU."""
        return self == SWIGLU

    def __call__(self, gate_up: Tensor) -> Tensor:
        """In torch, differentiable, ``[M, 2·I]`` to ``[M, I]``."""
        gate, up = self._parts(gate_up)
        if self.is_plain:
            return nn.functional.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + self.offset) * (gate * torch.sigmoid(self.alpha * gate))

    def fits(self, gate_up_size: int, dtype: torch.dtype, trains: bool = True) -> bool:
        """Whether an operator of torch_npu computes it, and its gradient if it trains, for ``[M, gate_up_size]``."""
        if self.is_plain:
            return not trains or gate_up_size // 2 * dtype.itemsize % _ALIGNMENT == 0
        return hasattr(torch.ops.npu, "npu_clipped_swiglu")  # absent from torch_npu 2.6.0, 2.7.1 and 2.8.0

    def forward(self, gate_up: Tensor) -> Tensor:
        """In one launch, without a gradient; float32 inside, rounded once."""
        if self.is_plain:
            return torch.ops.npu.npu_swiglu(gate_up, -1)
        return torch.ops.npu.npu_clipped_swiglu(
            gate_up,
            group_index=None,
            dim=-1,
            alpha=self.alpha,
            limit=self.limit,
            bias=self.offset,
            interleaved=self.interleaved,
        )

    def backward(self, grad: Tensor, gate_up: Tensor) -> Tensor:
        """The gradient of ``gate_up``."""
        if self.is_plain:
            return torch.ops.npu.npu_swiglu_backward(grad, gate_up, -1)
        gate, up, grad = (tensor.float() for tensor in (*self._parts(gate_up), grad))
        clipped = gate.clamp(max=self.limit)
        sigmoid = torch.sigmoid(self.alpha * clipped)
        slope = sigmoid * (1 + self.alpha * clipped * (1 - sigmoid)) * (gate <= self.limit)
        d_gate = grad * (up.clamp(-self.limit, self.limit) + self.offset) * slope
        d_up = grad * clipped * sigmoid * (up.abs() <= self.limit)
        joined = torch.stack((d_gate, d_up), -1).flatten(-2) if self.interleaved else torch.cat((d_gate, d_up), -1)
        return joined.to(gate_up.dtype)

    def _parts(self, gate_up: Tensor) -> tuple[Tensor, ...]:
        return gate_up.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else gate_up.chunk(2, -1)


SWIGLU = Gate()


class GateFunction(torch.autograd.Function):
    """A gate in one launch, differentiable."""

    @staticmethod
    def forward(ctx, gate: Gate, gate_up: Tensor) -> Tensor:
        ctx.gate = gate
        ctx.save_for_backward(gate_up)
        return gate.forward(gate_up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[None, Tensor]:
        return None, ctx.gate.backward(grad.contiguous(), *ctx.saved_tensors)


Activation = Gate | Callable[[Tensor], Tensor]


def activation_of(experts: nn.Module) -> Activation:
    """What an experts module of transformers does between its products.

    The first call for a module evaluates its gate on a few numbers on the host, and the module remembers what it was:
    whoever changes an attribute that the gate reads calls :func:`forget`.
    While a graph is captured there is no time for that: a module that is seen there first computes its gate in torch.
    """
    if not experts.has_gate:
        return experts.act_fn
    known = getattr(experts, _KNOWN, None)
    if known is None and not torch.compiler.is_compiling():
        known = tuple(_recognise(experts) or ())  # no class of ours: the module may be saved as a whole
        setattr(experts, _KNOWN, known)
    return Gate(*known) if known else experts._apply_gate


def forget(experts: nn.Module) -> None:
    """Take away from a module what its gate was found to be."""
    vars(experts).pop(_KNOWN, None)


def _recognise(experts: nn.Module) -> Gate | None:
    """The gate with the values of a module's own, None where there is none."""
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
        candidates = [SWIGLU]
        candidates += [
            Gate(alpha, limit, offset, interleaved)
            for limit in floats
            for alpha in (1.0, *floats)
            for offset in _UP_OFFSETS
            for interleaved in (False, True)
        ]
        # float32 leaves some 1e-6 between two ways to compute it
        same = (c for c in candidates if values.shape == (len(gate_up), 2) and _close(values, c(gate_up)))
        return next(same, None)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-5, atol=1e-5)
