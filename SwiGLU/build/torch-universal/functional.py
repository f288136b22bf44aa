"""Gated linear units as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.clipped import clipped_swiglu_in_torch, has_clipped_gradient, has_clipped_swiglu
from ._common.derivatives import is_transformed, needs_grad
from ._common.distributed import is_distributed
from .operators import EXACT_GEGLU, GEGLU, SWIGLU, GatedUnit, clipped_swiglu_fused

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_ALIGNMENT = 64  # bytes of a half that npu_swiglu_backward takes: CANN, aclnnSwiGluGrad


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Compute ``silu(gate) * up``, on the NPU in float32 and rounded once.

    It is one launch of ``npu_swiglu`` where both come as one tensor, as one matrix product gives them; its gradient
    saves that tensor and nothing else. Two tensors are joined for it where a gradient is needed, and multiplied as they
    are where none is: that moves less. Differentiable as often as torch's own operators are, and computed in torch
    under torch.func and forward-mode derivatives.

    Args:
        gate: ``[..., I]``, of a floating dtype; without ``up`` ``[..., 2·I]``, the gate first.
        up: ``[..., I]``, of a floating dtype, on the device of ``gate``.

    Returns:
        ``[..., I]``, in the dtype that gate and up promote to.

    Raises:
        ValueError: the last dimension of a joined tensor is odd, or gate and up differ in shape or device.
        TypeError: an argument is not floating point.
    """
    _check("swiglu", gate, up)
    return apply_unit(SWIGLU, gate, up)


def apply_unit(unit: GatedUnit, gate: Tensor, up: Tensor | None = None, is_plain: bool = False) -> Tensor:
    """Compute a gated unit of arguments that fit, as those from projections do: nothing is checked.

    ``is_plain`` says what else would be asked: the tensors are no DTensors, and torch transforms nothing.
    """
    if up is None:
        if _is_fused(gate, unit.wants_alignment, is_plain):
            return unit.launch(gate)
        gate, up = unit.halves(gate)
    elif _is_worth_joining(gate, up, unit.wants_alignment):
        return unit.launch(torch.cat((gate, up), -1))
    return unit.in_torch(gate, up)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "tanh") -> Tensor:
    """Compute ``gelu(gate, approximate=approximate) * up``.

    It is one launch of ``npu_geglu``, with the conditions of :func:`swiglu`. In float16 the operator rounds the
    activation before it multiplies. Differentiable as :func:`swiglu` is, under ``torch.compile`` too.

    Args:
        gate: ``[..., I]``, of a floating dtype; without ``up`` ``[..., 2·I]``, the gate first.
        up: ``[..., I]``, of a floating dtype, on the device of ``gate``.
        approximate: "tanh", or "none" for GELU itself.

    Returns:
        ``[..., I]``, in the dtype that gate and up promote to.

    Raises:
        ValueError: the last dimension of a joined tensor is odd, gate and up differ in shape or device, or
            ``approximate`` is neither of the two.
        TypeError: an argument is not floating point.
    """
    _check("geglu", gate, up)
    if approximate not in ("none", "tanh"):
        raise ValueError(f'geglu: approximate must be "none" or "tanh", got {approximate!r}')
    return apply_unit(GEGLU if approximate == "tanh" else EXACT_GEGLU, gate, up)


def clipped_swiglu(gate_up: Tensor, alpha: float = 1.702, limit: float = 7.0, interleaved: bool = True) -> Tensor:
    """Compute ``g · sigmoid(alpha · g) · (u + 1)`` with ``g = min(gate, limit)`` and ``u = clamp(up, -limit, limit)``.

    That is the activation of gpt-oss: GptOssExperts._apply_gate of transformers. It is one launch of
    ``npu_clipped_swiglu`` where torch_npu has it. Differentiable as :func:`swiglu` is; what is saved is ``gate_up``.
    Where ``I`` is no multiple of 64 bytes, or ``alpha`` or ``limit`` is not positive, torch computes what is trained.

    Args:
        gate_up: ``[..., 2·I]``, of a floating dtype.
        alpha: the factor inside of the sigmoid.
        limit: where gate and up are clipped.
        interleaved: whether gate and up alternate in the last dimension; otherwise the gate is its first half.

    Returns:
        ``[..., I]``, in the dtype of ``gate_up``.

    Raises:
        ValueError: the last dimension is odd.
        TypeError: ``gate_up`` is not floating point.
    """
    _check("clipped_swiglu", gate_up, None)
    is_differentiable = has_clipped_gradient(alpha, limit) or not needs_grad(gate_up)
    if _is_fused(gate_up) and has_clipped_swiglu() and is_differentiable:
        return clipped_swiglu_fused(gate_up, alpha, limit, 1.0, interleaved)
    return clipped_swiglu_in_torch(gate_up, alpha, limit, 1.0, interleaved)


def clamped_swiglu(gate: Tensor, up: Tensor | None = None, limit: float = 10.0) -> Tensor:
    """Compute ``silu(min(gate, limit)) * clamp(up, -limit, limit)``, with the conditions of :func:`swiglu`.

    That is DeepseekV4MLP.forward of transformers, models/deepseek_v4/modeling_deepseek_v4.py, between its projections.
    It is one launch of ``npu_clipped_swiglu`` where torch_npu has it, and otherwise three.

    Args:
        gate: ``[..., I]``, of a floating dtype; without ``up`` ``[..., 2·I]``, the gate first.
        up: ``[..., I]``, of a floating dtype, on the device of ``gate``.
        limit: where gate and up are clamped, greater than zero.

    Returns:
        ``[..., I]``, in the dtype that gate and up promote to.

    Raises:
        ValueError: the last dimension of a joined tensor is odd, or gate and up differ in shape or device.
        TypeError: an argument is not floating point.
    """
    _check("clamped_swiglu", gate, up)
    return apply_clamped_swiglu(gate, up, limit)


def apply_clamped_swiglu(gate: Tensor, up: Tensor | None, limit: float) -> Tensor:
    """Compute :func:`clamped_swiglu` of arguments that fit, in one tensor, two or joined: nothing is checked."""
    if up is None:
        if _is_fused(gate):
            return clipped_swiglu_fused(gate, 1.0, limit)
        gate, up = gate.chunk(2, -1)
    elif _is_worth_joining(gate, up):
        return clipped_swiglu_fused(torch.cat((gate, up), -1), 1.0, limit)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def takes_scaled(x: Tensor) -> bool:
    """Tell whether ``npu_clipped_swiglu``, and ``npu_swiglu_backward`` if it is trained, take what a product gives."""
    return _is_fused(x, is_plain=True) and has_clipped_swiglu()


def is_fused_dtype(dtype: torch.dtype) -> bool:
    """Tell whether the operators take a dtype."""
    return dtype in _FUSED_DTYPES


def is_aligned(size: int, dtype: torch.dtype) -> bool:
    """Tell whether the gradient of ``npu_swiglu`` takes halves of so many values of a dtype."""
    return size * dtype.itemsize % _ALIGNMENT == 0


def _is_fused(gate_up: Tensor, wants_alignment: bool = True, is_plain: bool = False) -> bool:
    """Tell whether the operators take gate and up in one tensor, for a gradient too if one is asked for.

    That is what they take on Atlas A2 and A3: op-plugin, docs/zh/custom_APIs/torch_npu. What torch.func or forward-mode
    derivatives transform is left to torch, which has the rules for it.
    """
    is_trained = torch.is_grad_enabled() and gate_up.requires_grad
    return (
        gate_up.device.type == "npu"
        and gate_up.dtype in _FUSED_DTYPES
        and gate_up.numel() > 0
        and gate_up.is_contiguous()
        and (is_plain or not (is_distributed(gate_up) or is_transformed()))
        and not (is_trained and wants_alignment and not is_aligned(gate_up.shape[-1] // 2, gate_up.dtype))
    )


def _is_worth_joining(gate: Tensor, up: Tensor, wants_alignment: bool = True) -> bool:
    """Tell whether gate and up are to be joined for one launch.

    In tensors of the size of ``gate`` that move: joined 7 forward and 5 backward, apart 5 and 9. Three launches instead
    of five, and two tensors saved instead of three.
    """
    return (
        needs_grad(gate, up)  # first: a graph may not know whether there are any rows
        and _is_fused(gate, wants_alignment=False)
        and gate.dtype == up.dtype
        and (not wants_alignment or is_aligned(gate.shape[-1], gate.dtype))
    )


def _check(name: str, gate: Tensor, up: Tensor | None) -> None:
    """Raise what the function ``name`` says of arguments that do not fit."""
    if not gate.is_floating_point():
        raise TypeError(f"{name}: gate must be floating point, got {gate.dtype}")
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2:
            raise ValueError(
                f"{name}: gate and up in one tensor need an even last dimension, got {list(gate.shape)}; "
                "give them as two tensors otherwise"
            )
        return
    if not up.is_floating_point():
        raise TypeError(f"{name}: up must be floating point, got {up.dtype}")
    for what, a, b in (("shape", list(gate.shape), list(up.shape)), ("device", gate.device, up.device)):
        if a != b:
            raise ValueError(f"{name}: gate and up must have one {what}, got {a} and {b}")
