"""The clipped SwiGLU of gpt-oss and its relatives: in torch, as one launch, and its gradient.

``g · sigmoid(alpha · g) · (u + offset)`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``: that is
GptOssExperts._apply_gate of transformers, models/gpt_oss/modeling_gpt_oss.py, for alpha 1.702, limit 7 and offset 1.
Everywhere gate and up come as one tensor ``[..., 2·I]``, in which they alternate if ``interleaved``; otherwise the gate
is the first half. Beside it stands the gradient of GEGLU, which two kernels need too.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes


# npu_geglu has a derivative, but the meta kernel of npu_geglu_grad raises in every release up to 2.14, so that it fails
# under torch.compile and with fake tensors. An operator around it has a meta kernel that works.
@torch.library.custom_op(f"{__name__.partition('.')[0]}::geglu_grad", mutates_args=())
def geglu_grad(grad: Tensor, x: Tensor, gelu: Tensor, approximate: int, activate_left: bool) -> Tensor:
    """Return the gradient of ``x``, ``[..., 2·I]``; ``gelu`` is the second result of ``npu_geglu``."""
    return torch.ops.npu.npu_geglu_grad(grad, x, gelu, -1, approximate, activate_left)


@geglu_grad.register_fake
def _(grad: Tensor, x: Tensor, gelu: Tensor, approximate: int, activate_left: bool) -> Tensor:
    return torch.empty_like(x)


def has_clipped_swiglu() -> bool:
    """Tell whether torch_npu has ``npu_clipped_swiglu``, which 2.6.0, 2.7.1 and 2.8.0 do not have."""
    return hasattr(torch.ops.npu, "npu_clipped_swiglu")


def launch_clipped_swiglu(gate_up: Tensor, alpha: float, limit: float, offset: float, interleaved: bool) -> Tensor:
    """Compute it in one launch, in float32 inside and rounded once: ``[..., I]``, without a gradient."""
    return torch.ops.npu.npu_clipped_swiglu(
        gate_up, group_index=None, dim=-1, alpha=alpha, limit=limit, bias=offset, interleaved=interleaved
    )


def clipped_swiglu_in_torch(gate_up: Tensor, alpha: float, limit: float, offset: float, interleaved: bool) -> Tensor:
    """Compute it with operators of torch, differentiable, each of which rounds: ``[..., I]``."""
    gate, up = gate_and_up(gate_up, interleaved)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + offset) * (gate * torch.sigmoid(alpha * gate))


def has_clipped_gradient(alpha: float, limit: float) -> bool:
    """Tell whether :func:`clipped_swiglu_gradient` takes these numbers."""
    return alpha > 0 and limit > 0


def clipped_swiglu_gradient(
    grad: Tensor, gate_up: Tensor, alpha: float, limit: float, offset: float, interleaved: bool
) -> Tensor:
    """Return the gradient of ``gate_up``, ``[..., 2·I]`` in its dtype, where ``I`` is a multiple of 64 bytes.

    ``npu_clipped_swiglu`` has no derivative, and says nothing when one is asked for. But ``alpha`` times its value is
    SwiGLU of ``alpha · g`` and ``u + offset``, whose gradient ``npu_swiglu_backward`` computes in float32 and rounds
    once. What was clipped has none, as torch's clamp has it: beyond the limit, and from torch 2.14 on at it, too.
    """
    gate, up = gate_and_up(gate_up, interleaved)
    if interleaved:  # each operator would copy what it reads from between other values: one copy serves them all
        gate, up = gate_up.unflatten(-1, (-1, 2)).movedim(-1, 0).contiguous()
    clipped = gate.new_empty(2, *gate.shape)
    # the sigmoid of -128 is 0 in float32, and what is below may overflow when it is scaled; a compiler takes a number
    # with a name in the module for an input, which it cannot add in a backward
    torch.clamp(gate, -128.0 / alpha, limit, out=clipped[0])
    torch.clamp(up, -limit, limit, out=clipped[1])
    if alpha != 1:
        clipped[0].mul_(alpha)
    if offset:
        clipped[1].add_(offset)
    found = torch.ops.npu.npu_swiglu_backward(grad.reshape(-1), clipped.view(-1), -1).view_as(clipped)
    if alpha != 1:
        found[1].div_(alpha)
    del clipped
    end = _next(limit, gate_up.dtype) if _CLAMP_KEEPS_LIMIT else limit
    keep_within = torch.ops.aten.hardtanh_backward
    if torch.compiler.is_compiling():  # it would take the sizes for numbers where it writes between other values
        parts = keep_within(found[0], gate, -math.inf, end), keep_within(found[1], up, -end, end)
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    d_gate_up = torch.empty_like(gate_up)
    d_gate, d_up = gate_and_up(d_gate_up, interleaved)
    keep_within.grad_input(found[0], gate, -math.inf, end, grad_input=d_gate)
    keep_within.grad_input(found[1], up, -end, end, grad_input=d_up)
    return d_gate_up


def gate_and_up(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Split a tensor ``[..., 2·I]`` into views of the gate and of up, ``[..., I]`` each."""
    return gate_up.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else gate_up.chunk(2, -1)


def _next(number: float, dtype: torch.dtype) -> float:
    """Return the least value of a dtype above a positive number."""
    step = torch.finfo(dtype).eps * 2.0 ** (math.frexp(number)[1] - 1)
    return number if number == math.inf else (math.floor(number / step) + 1) * step


def _clamp_keeps_limit() -> bool:
    """Tell whether torch's clamp has a gradient at its limit, wherever this file is imported."""
    hooks = saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)  # a checkpoint would run again
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad(), hooks:
        x = torch.ones((), device="cpu", requires_grad=True)
        return bool(torch.autograd.grad(x.clamp(max=1.0), x)[0])


_CLAMP_KEEPS_LIMIT = _clamp_keeps_limit()  # once: a compiler cannot ask
