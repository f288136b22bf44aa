"""The clipped SwiGLU of gpt-oss and its relatives: in torch, as one launch, and its gradient.

``g · sigmoid(alpha · g) · (u + offset)`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``: that is
GptOssExperts._apply_gate of transformers, models/gpt_oss/modeling_gpt_oss.py, for alpha 1.702, limit 7 and offset 1.
Everywhere gate and up come as one tensor ``[..., 2·I]``, in which they alternate if ``interleaved``; otherwise the gate
is the first half.
"""

from __future__ import annotations

import torch
from torch import Tensor


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


def clipped_swiglu_gradient(
    grad: Tensor, gate_up: Tensor, alpha: float, limit: float, offset: float, interleaved: bool
) -> Tensor:
    """Return the gradient of ``gate_up``, ``[..., 2·I]`` in its dtype, computed in float32.

    ``npu_clipped_swiglu`` has no derivative, and says nothing when one is asked for.
    """
    gate, up, grad = (tensor.float() for tensor in (*gate_and_up(gate_up, interleaved), grad))
    clipped = gate.clamp(max=limit)
    sigmoid = torch.sigmoid(alpha * clipped)
    slope = sigmoid * (1 + alpha * clipped * (1 - sigmoid)) * (gate <= limit)
    d_gate = grad * (up.clamp(-limit, limit) + offset) * slope
    d_up = grad * clipped * sigmoid * (up.abs() <= limit)
    joined = torch.stack((d_gate, d_up), -1).flatten(-2) if interleaved else torch.cat((d_gate, d_up), -1)
    return joined.to(gate_up.dtype)


def gate_and_up(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    """Split a tensor ``[..., 2·I]`` into views of the gate and of up, ``[..., I]`` each."""
    return gate_up.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else gate_up.chunk(2, -1)
