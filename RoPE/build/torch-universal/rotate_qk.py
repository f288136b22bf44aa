"""q and k, rotated by one cos and sin.

All layers of a model rotate by the same two tensors, and q and k have the same shapes and strides in all of them: what
follows from those is kept for as long as cos lives, and not with it: who saves a tensor saves what it holds.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .limits import DTYPES, HEAD_SIZE, fits_half, fits_half_gradient, fits_interleave
from .one_token import rotate_one_token
from .rotation import check, rotate, rotate_back

# by the id of a cos, until it dies: what tells of that, its sin, what of q and k the layout is for, and the layout.
# torch's own dictionary of tensors makes a dozen calls to find one
_layouts: dict[int, tuple[weakref.ref[Tensor], Tensor, Any, Any]] = {}


def rotate_qk(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate q and k by one cos and sin, which get the dimension of the heads at ``unsqueeze_dim``.

    What is said of :func:`rotate` holds. q and k are ``[B, N, S, D]`` or ``[B, S, N, D]``, cos and sin ``[B, S, D]``.

    Raises:
        ValueError: the shapes do not fit, or the tensors are on different devices.
        TypeError: a tensor is not floating point.
    """
    enabled = torch.is_grad_enabled()
    trains = enabled and (q.requires_grad or k.requires_grad)
    if torch.compiler.is_compiling() or is_transformed():
        layout = None
    else:
        if cos.shape[-2:-1] == (1,) and not interleaved:
            together = rotate_one_token(q, k, cos, sin, unsqueeze_dim)
            if together is not None:
                return together
        layout = _layout(q, k, cos, sin, unsqueeze_dim, interleaved, enabled, trains and not interleaved)
    if layout is None:
        check(cos, sin, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
    a, b = (_RotateQK.apply if trains else _launch_qk)(q, k, layout, "interleave" if interleaved else "half")
    return (a.transpose(1, 2), b.transpose(1, 2)) if layout[0] else (a, b)


def _layout(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    unsqueeze_dim: int,
    interleaved: bool,
    enabled: bool,
    trains_halves: bool,
) -> tuple[bool, Tensor, Tensor] | None:
    """Find how the operator takes q and k as they lie in memory; None where it does not, or one differs from the other.

    ``enabled`` says that gradients are: where cos or sin need one, torch computes. ``trains_halves`` says that q or
    k do, in the mode "half", whose gradient takes fewer shapes.

    Returns:
        Whether the dimensions in the middle of q and k change places, and cos and sin in that order.
    """
    if enabled and (cos.requires_grad or sin.requires_grad):
        return None
    forms = q.shape, k.shape, q.stride(), k.stride(), q.dtype, k.dtype, q.device
    key = (type(q), *forms, unsqueeze_dim, interleaved, trains_halves)
    number = id(cos)
    kept = _layouts[number] if number in _layouts else None  # noqa: SIM401
    if kept is not None and kept[1] is sin and kept[2] == key and not torch._C._len_torch_dispatch_stack():
        return kept[3]  # selective checkpointing counts operators: what it sees has to be the same again
    if is_distributed(q) or not _are_alike(q, k, cos, sin) or unsqueeze_dim not in (1, 2):
        return None
    (q_batch, q1, q2, size), (k_batch, k1, k2, _), (rows, positions, _) = q.shape, k.shape, cos.shape
    swap = q.stride(1) < q.stride(2)  # [B, N, S, D] as a view of [B, S, N, D]
    if swap:
        q1, q2, k1, k2 = q2, q1, k2, k1
    axis = 3 - unsqueeze_dim if swap else unsqueeze_dim
    table = (rows, 1, positions, size) if axis == 1 else (rows, positions, 1, size)
    fits, itemsize = fits_interleave if interleaved else fits_half, q.element_size()
    shapes = (q_batch, q1, q2, size), (k_batch, k1, k2, size)
    layout = None
    if all(fits(s, table, itemsize) and (not trains_halves or fits_half_gradient(s, table)) for s in shapes):
        # a view of cos itself would keep it alive
        layout = swap, cos.detach().unsqueeze(axis), sin.detach().unsqueeze(axis)
    _layouts[number] = weakref.ref(cos, lambda _, layouts=_layouts: layouts.pop(number, None)), sin, key, layout
    return layout


def _are_alike(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Tell whether they keep all rules of :func:`check`, those of the operator but for shapes, and lie in one way."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3:
        return False
    dtype, device, size = q.dtype, q.device, q.shape[-1]
    return (
        dtype in DTYPES
        and dtype is k.dtype is cos.dtype is sin.dtype
        and device == k.device == cos.device == sin.device
        and device.type == "npu"
        and size == k.shape[-1] == cos.shape[-1] < HEAD_SIZE
        and size % 2 == 0
        and cos.shape == sin.shape
        and q.numel() > 0
        and k.numel() > 0
        and (q.stride(1) < q.stride(2)) == (k.stride(1) < k.stride(2))
    )


def _launch_qk(q: Tensor, k: Tensor, layout: tuple[bool, Tensor, Tensor], mode: str) -> tuple[Tensor, Tensor]:
    """Launch the operator for q and for k; what comes out lies as they do in memory."""
    swap, cos, sin = layout
    if swap:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    return torch.ops.npu.npu_rotary_mul(q, cos, sin, mode), torch.ops.npu.npu_rotary_mul(k, cos, sin, mode)


class _RotateQK(torch.autograd.Function):
    """Rotates both as one node of autograd, which keeps cos and sin as all layers have them.

    They are neither inputs nor outputs, and all layers share them: what save_for_backward looks after, in longer time,
    is that nobody writes to them before the backward.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, layout: tuple[bool, Tensor, Tensor], mode: str) -> tuple[Tensor, Tensor]:
        ctx.layout, ctx.mode = layout, mode
        ctx.versions = layout[1]._version, layout[2]._version
        return _launch_qk(q, k, layout, mode)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        swap, cos, sin = ctx.layout
        if (cos._version, sin._version) != ctx.versions:
            raise RuntimeError(
                "cos or sin has been modified by an inplace operation after q and k were rotated by it, and their "
                "gradients need it as it was: call backward() first, or write to another tensor"
            )
        gradients: list[Tensor | None] = [None, None]
        for i, grad in enumerate(grads):
            if ctx.needs_input_grad[i]:
                gradient = rotate_back(grad, cos, sin, ctx.mode)
                gradients[i] = gradient.transpose(1, 2) if swap else gradient
        return *gradients, None, None
