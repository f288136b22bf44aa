"""q and k, rotated by one cos and sin: what both have in common is asked and made once."""

from __future__ import annotations

import torch
from torch import Tensor

from .limits import DTYPES, HEAD_SIZE, fits_half, fits_interleave
from .rotation import check, rotate


def rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """:func:`rotate` of q and k, with cos and sin that get the dimension of the heads at ``unsqueeze_dim``.

    Raises:
        ValueError: the shapes do not fit, or the tensors are on different devices.
        TypeError: a tensor is not floating point.
    """
    swap = _heads_last(q, k, cos, sin, unsqueeze_dim, interleaved)
    if swap is None:
        check(cos, sin, q=q, k=k)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
    axis, mode = 3 - unsqueeze_dim if swap else unsqueeze_dim, "interleave" if interleaved else "half"
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad):
        a, b = _Rotations.apply(q, k, cos, sin, axis, swap, mode)
    else:
        a, b = _rotate_both(q, k, cos, sin, axis, swap, mode)
    return (a.transpose(1, 2), b.transpose(1, 2)) if swap else (a, b)


def _heads_last(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, interleaved: bool) -> bool | None:
    """Whether the two dimensions in the middle of q and k have to change places, so that nothing is copied.

    None where they differ in that, or in anything else that matters, or the operator does not take them so.
    """
    dtype = q.dtype
    if not (dtype is k.dtype is cos.dtype is sin.dtype and dtype in DTYPES and q.device.type == "npu"):
        return None
    if not (q.dim() == k.dim() == 4 and cos.dim() == 3 and unsqueeze_dim in (1, 2)):
        return None
    if torch.compiler.is_compiling():  # what is made twice is made once there anyway
        return None
    if torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad):
        return None
    (b, q1, q2, size), (k_b, k1, k2, k_size), table = q.shape, k.shape, cos.shape
    (_, of_q1, of_q2, _), (_, of_k1, of_k2, _) = q.stride(), k.stride()
    rows, positions, width = table
    swap = of_q1 < of_q2  # as [B, N, S, D] that are views of [B, S, N, D]
    if swap:
        q1, q2, k1, k2 = q2, q1, k2, k1
    fits, itemsize = fits_interleave if interleaved else fits_half, q.element_size()
    table4 = (rows, 1, positions, size) if (unsqueeze_dim == 1) != swap else (rows, positions, 1, size)
    fit = (
        swap == (of_k1 < of_k2)
        and size == k_size == width < HEAD_SIZE
        and size % 2 == 0
        and table == sin.shape
        and q.device == k.device == cos.device == sin.device
        and q.numel() > 0
        and k.numel() > 0
        and fits((b, q1, q2, size), table4, itemsize)
        and fits((k_b, k1, k2, size), table4, itemsize)
    )
    return swap if fit else None


def _rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int, swap: bool, mode: str
) -> tuple[Tensor, Tensor]:
    """In the layout of the memory: with ``swap`` the result is ``[B, S, N, D]`` for ``[B, N, S, D]``."""
    if swap:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = cos.unsqueeze(axis), sin.unsqueeze(axis)
    return torch.ops.npu.npu_rotary_mul(q, cos, sin, mode), torch.ops.npu.npu_rotary_mul(k, cos, sin, mode)


class _Rotations(torch.autograd.Function):
    """Both as one node, which keeps cos and sin."""

    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, axis: int, swap: bool, mode: str
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.axis, ctx.swap, ctx.mode = axis, swap, mode
        ctx.set_materialize_grads(False)
        return _rotate_both(q, k, cos, sin, axis, swap, mode)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_q: Tensor | None, d_k: Tensor | None) -> tuple[Tensor | None, ...]:
        cos, sin = (table.unsqueeze(ctx.axis) for table in ctx.saved_tensors)
        gradients = [
            torch.ops.npu.npu_rotary_mul_backward(grad, grad, cos, sin, ctx.mode)[0]
            if grad is not None and needed
            else None
            for grad, needed in zip((d_q, d_k), ctx.needs_input_grad)
        ]
        if ctx.swap:
            gradients = [grad if grad is None else grad.transpose(1, 2) for grad in gradients]
        return *gradients, None, None, None, None, None
