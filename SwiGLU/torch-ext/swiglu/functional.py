"""Gated linear units as functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ._common.clipped import clipped_swiglu_in_torch, has_clipped_gradient, has_clipped_swiglu
from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .clamped import clamped_in_torch, clamped_swiglu_fused
from .operators import clipped_swiglu_fused, geglu_fused

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
    return swiglu_of(gate, up)


def swiglu_of(gate: Tensor, up: Tensor | None = None, is_plain: bool = False) -> Tensor:
    """Compute :func:`swiglu` of arguments that fit, as those from projections do: nothing is checked.

    ``is_plain`` says what else would be asked: the tensors are no DTensors, and torch transforms nothing.
    """
    if up is None:
        if _is_fused(gate, is_plain) and (not _needs_grad(gate) or is_aligned(gate.shape[-1] // 2, gate.dtype)):
            return torch.ops.npu.npu_swiglu(gate, -1)
        gate, up = gate.chunk(2, -1)
    elif _is_worth_joining(gate, up) and is_aligned(gate.shape[-1], gate.dtype):
        return torch.ops.npu.npu_swiglu(torch.cat((gate, up), -1), -1)
    return F.silu(gate) * up


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
    return geglu_of(gate, up) if approximate == "tanh" else exact_geglu_of(gate, up)


def geglu_of(gate: Tensor, up: Tensor | None = None, is_plain: bool = False) -> Tensor:
    """Compute :func:`geglu` of arguments that fit, with ``is_plain`` as in :func:`swiglu_of`: nothing is checked."""
    return _geglu(gate, up, is_plain, is_exact=False)


def exact_geglu_of(gate: Tensor, up: Tensor | None = None, is_plain: bool = False) -> Tensor:
    """Compute what :func:`geglu_of` does, with GELU itself."""
    return _geglu(gate, up, is_plain, is_exact=True)


def _geglu(gate: Tensor, up: Tensor | None, is_plain: bool, is_exact: bool) -> Tensor:
    if up is None:
        if _is_fused(gate, is_plain):
            return geglu_fused(gate, is_exact)
        gate, up = gate.chunk(2, -1)
    elif _is_worth_joining(gate, up):
        return geglu_fused(torch.cat((gate, up), -1), is_exact)
    return F.gelu(gate, approximate="none" if is_exact else "tanh") * up


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
    is_differentiated = is_aligned(gate_up.shape[-1] // 2, gate_up.dtype) and has_clipped_gradient(alpha, limit)
    if _is_fused(gate_up) and has_clipped_swiglu() and (is_differentiated or not _needs_grad(gate_up)):
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
    return clamped_swiglu_of(gate, up, limit)


def clamped_swiglu_of(gate: Tensor, up: Tensor | None, limit: float, is_plain: bool = False) -> Tensor:
    """Compute ``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of arguments that fit, as DeepSeek-V4 does.

    Gate and up are one tensor, two or joined as for :func:`swiglu_of`, and nothing is checked.
    """
    if up is None:
        if _is_fused(gate, is_plain) and (not _needs_grad(gate) or is_aligned(gate.shape[-1] // 2, gate.dtype)):
            return clamped_swiglu_fused(gate, limit)
        gate, up = gate.chunk(2, -1)
    elif _is_worth_joining(gate, up) and is_aligned(gate.shape[-1], gate.dtype):
        return clamped_swiglu_fused(torch.cat((gate, up), -1), limit)
    return clamped_in_torch(gate, up, limit)


def takes_scaled(x: Tensor) -> bool:
    """Tell whether ``npu_clipped_swiglu``, and ``npu_swiglu_backward`` if it is trained, take what a product gives."""
    aligned = not _needs_grad(x) or is_aligned(x.shape[-1] // 2, x.dtype)
    return aligned and _is_fused(x, is_plain=True) and has_clipped_swiglu()


def is_fused_dtype(dtype: torch.dtype) -> bool:
    """Tell whether the operators take a dtype."""
    return dtype in _FUSED_DTYPES


def is_aligned(size: int, dtype: torch.dtype) -> bool:
    """Tell whether the gradient of ``npu_swiglu`` takes halves of so many values of a dtype."""
    return size * dtype.itemsize % _ALIGNMENT == 0


def _is_fused(x: Tensor, is_plain: bool = False) -> bool:
    """Tell whether the operators take a tensor (Atlas A2 and A3): op-plugin, docs/zh/custom_APIs/torch_npu.

    What torch.func or forward-mode derivatives transform is left to torch, which has the rules for it.
    """
    return (
        x.device.type == "npu"
        and x.dtype in _FUSED_DTYPES
        and x.numel() > 0
        and x.is_contiguous()
        and (is_plain or not (is_distributed(x) or is_transformed()))
    )


def _is_worth_joining(gate: Tensor, up: Tensor) -> bool:
    """Tell whether gate and up are to be joined for one launch.

    In tensors of the size of ``gate`` that move: joined 7 forward and 5 backward, apart 5 and 9. Three launches instead
    of five, and two tensors saved instead of three.
    """
    return _is_fused(gate) and gate.dtype == up.dtype and _needs_grad(gate, up)


def _needs_grad(*tensors: Tensor) -> bool:
    """Tell whether a gradient is asked for of one of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


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
