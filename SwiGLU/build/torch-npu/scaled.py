"""The SwiGLU of Falcon-H1, whose gate is multiplied by a number first: ``silu(factor · gate) · up``.

It is ``factor`` times ``gate · sigmoid(factor · gate) · up``, which ``npu_clipped_swiglu`` computes where it has
nothing to clip. That is FalconH1MLP.forward of transformers, models/falcon_h1/modeling_falcon_h1.py, before ``down``.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ._common.clipped import launch_clipped_swiglu
from ._common.derivatives import by_formula, gradients

_NO_LIMIT = torch.finfo(torch.float32).max


def scaled_swiglu_fused(gate_up: Tensor, factor: float) -> Tensor:
    """Compute ``silu(factor · gate) · up / factor``, differentiable, of ``[..., 2·I]``, the gate first."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _ScaledSwiGLU.apply(gate_up, factor)
    return _launch_scaled(gate_up, factor)


def _launch_scaled(gate_up: Tensor, factor: float) -> Tensor:
    return launch_clipped_swiglu(gate_up, factor, _NO_LIMIT, 0.0, interleaved=False)


def _scaled_in_torch(gate_up: Tensor, factor: float) -> Tensor:
    """Compute it in float32, as the operator does."""
    gate, up = gate_up.float().chunk(2, -1)
    return gate * torch.sigmoid(factor * gate) * up


class _ScaledSwiGLU(torch.autograd.Function):
    """Keeps the argument. Its gradient is that of ``npu_swiglu`` of a scaled gate, less the factor."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.factor = factor
        return _launch_scaled(gate_up, factor)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None]:
        (gate_up,) = ctx.saved_tensors
        factor, half = ctx.factor, gate_up.shape[-1] // 2
        if by_formula(grad):
            return gradients(partial(_scaled_in_torch, factor=factor), (gate_up,), (True,), grad)[0], None
        scaled = gate_up.clone()
        scaled[..., :half].mul_(factor)
        found = torch.ops.npu.npu_swiglu_backward(grad.contiguous(), scaled, -1)
        found[..., half:].div_(factor)
        return found, None
