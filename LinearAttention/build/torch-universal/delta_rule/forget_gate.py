"""The forget gate of Kimi delta attention: logarithms of decays, one for each channel of a key."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._common.derivatives import by_formula, gradients, is_transformed
from .._common.distributed import is_distributed
from .decays import row_dots

_THRESHOLD = 20.0  # from here on softplus(x) is x, in transformers as in torch


def forget_gate(x: Tensor, bias: Tensor, a_log: Tensor) -> Tensor:
    """Compute ``-exp(a_log) softplus(x + bias)`` in float32.

    That is KimiLinearForgetGate.forward of transformers, models/kimi_linear/modeling_kimi_linear.py, behind its
    projections. For the gradient the arguments are kept, and the result, which a delta rule keeps anyway.

    Args:
        x: ``[B, T, H, K]``, of a floating dtype.
        bias: ``[H, K]``, likewise.
        a_log: ``[H, 1]``, likewise.

    Returns:
        ``[B, T, H, K]`` in float32.

    Raises:
        ValueError: the shapes do not fit.
    """
    if x.dim() != 4 or bias.shape != x.shape[2:] or a_log.shape != (x.shape[2], 1):
        raise ValueError(f"x {list(x.shape)} must be [B, T, H, K], bias {list(bias.shape)} [H, K], a_log [H, 1]")
    if is_transformed() or torch.compiler.is_compiling() or is_distributed(x, bias, a_log):
        return _forget_gate_in_torch(x, bias, a_log)
    return _ForgetGate.apply(x, bias, a_log)


class _ForgetGate(torch.autograd.Function):
    """Saves the arguments and the result, and neither the sum nor softplus of it.

    A second derivative, and several gradients at once, go through :func:`_forget_gate_in_torch`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, a_log: Tensor) -> Tensor:
        out = F.softplus(x + bias.float(), threshold=_THRESHOLD).mul_(_rate(a_log))
        ctx.save_for_backward(x, bias, a_log, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, a_log, out = ctx.saved_tensors
        if by_formula(grad):
            return tuple(gradients(_forget_gate_in_torch, (x, bias, a_log), ctx.needs_input_grad, grad))
        rate, sums = _rate(a_log), (0, 1)
        d_softplus = torch.ops.aten.softplus_backward(grad, x + bias.float(), 1.0, _THRESHOLD)
        d_x = torch.mul(d_softplus, rate, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
        d_bias = d_softplus.sum(sums) * rate
        d_a_log = row_dots(grad.flatten(0, 1), out.flatten(0, 1)).sum(0)  # since exp is its own derivative
        return d_x, d_bias.to(bias.dtype), d_a_log.to(a_log.dtype)


def _rate(a_log: Tensor) -> Tensor:
    return -a_log.float().exp()


def _forget_gate_in_torch(x: Tensor, bias: Tensor, a_log: Tensor) -> Tensor:
    return _rate(a_log) * F.softplus(x.float() + bias.float(), threshold=_THRESHOLD)
