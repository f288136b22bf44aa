"""The SwiGLU of DeepSeek-V4 and GLM-5: ``silu(g) · u`` with ``g = min(gate, limit)`` and ``u`` within ``±limit``.

That is DeepseekV4MLP.forward of transformers, models/deepseek_v4/modeling_deepseek_v4.py, between its projections.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.clipped import clipped_swiglu_gradient, has_clipped_swiglu, launch_clipped_swiglu
from ._common.derivatives import by_formula, gradients


def clamped_in_torch(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Compute it with operators of torch, differentiable: ``[..., I]`` each."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def clamped_swiglu_fused(gate_up: Tensor, limit: float) -> Tensor:
    """Compute it by operators of torch_npu, differentiable: ``[..., 2·I]``, the gate first, to ``[..., I]``."""
    if torch.is_grad_enabled() and gate_up.requires_grad:
        return _ClampedSwiGLU.apply(gate_up, limit)
    return _launch_clamped(gate_up, limit)


def _joined_in_torch(gate_up: Tensor, limit: float) -> Tensor:
    """Compute it in float32, as the operators do."""
    return clamped_in_torch(*gate_up.float().chunk(2, -1), limit)


def _launch_clamped(gate_up: Tensor, limit: float) -> Tensor:
    """Launch ``npu_clipped_swiglu``, or in releases without it ``npu_swiglu`` of what is clamped before."""
    if has_clipped_swiglu():
        return launch_clipped_swiglu(gate_up, 1.0, limit, 0.0, interleaved=False)
    clamped = gate_up.clamp(max=limit)
    clamped[..., clamped.shape[-1] // 2 :].clamp_(min=-limit)
    return torch.ops.npu.npu_swiglu(clamped, -1)


class _ClampedSwiGLU(torch.autograd.Function):
    """Keeps the argument only."""

    @staticmethod
    def forward(ctx, gate_up: Tensor, limit: float) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.limit = limit
        return _launch_clamped(gate_up, limit)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None]:
        (gate_up,) = ctx.saved_tensors
        if by_formula(grad):
            return gradients(partial(_joined_in_torch, limit=ctx.limit), (gate_up,), (True,), grad)[0], None
        return clipped_swiglu_gradient(grad, gate_up, 1.0, ctx.limit, 0.0, interleaved=False), None
