"""One tensor, rotated: by the operator where it takes the tensors, else in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ._common.derivatives import is_transformed
from ._common.distributed import is_distributed
from .limits import DTYPES, HEAD_SIZE, fits_half, fits_half_gradient, fits_interleave, fits_tokens


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, float32: bool = False) -> Tensor:
    """Compute ``x * cos + rotated(x) * sin`` for cos and sin that broadcast to x.

    With float32 the computation is in float32 whatever the dtypes are, and the caller rounds: the result is float32, or
    already has the dtype of x.
    """
    dtype = torch.promote_types(x.dtype, torch.promote_types(cos.dtype, sin.dtype))
    if _is_fused(x, cos, sin, dtype):
        # the operator wants four dimensions
        wide_cos, wide_sin = (table.to(dtype)[(None,) * (4 - table.dim())] for table in (cos, sin))
        rotated = _launch(x.to(dtype)[None] if x.dim() == 3 else x.to(dtype), wide_cos, wide_sin, interleaved)
        if rotated is not None:
            return rotated.squeeze(0) if x.dim() == 3 else rotated
    return _rotate_reference(x.float() if float32 else x, cos, sin, interleaved)


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate as much of the last dimension as cos is wide, and pass the rest through.

    The result lies in memory as x does, heads last or not. The gradient of a split puts its parts together in one pass,
    where those of two slices are filled up with zeros and added.
    """
    width = cos.shape[-1]
    if width == x.shape[-1]:
        return rotate(x, cos, sin, interleaved)
    if x.dim() == cos.dim() == 4 and x.stride(1) < x.stride(2):  # [B, N, S, D] as a view of [B, S, N, D]
        x, cos, sin = (tensor.transpose(1, 2) for tensor in (x, cos, sin))
        return rotate_part(x, cos, sin, interleaved).transpose(1, 2)
    part, rest = x.split((width, x.shape[-1] - width), -1)
    return torch.cat((rotate(part, cos, sin, interleaved), rest), -1)


def rotate_complex(tensors: tuple[Tensor, Tensor], factors: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply pairs of neighbours, as complex numbers, with complex factors in float32; dtypes are kept."""
    x, y = tensors
    if x.device.type != "npu" or factors.dtype != torch.complex64 or factors.requires_grad or is_distributed(x):
        return _multiply_complex(x, factors), _multiply_complex(y, factors)
    parts = torch.view_as_real(factors)
    cos, sin = each_twice(parts[..., 0]), each_twice(parts[..., 1])
    return rotate(x, cos, sin, True, True).to(x.dtype), rotate(y, cos, sin, True, True).to(y.dtype)


def rotate_back(grad: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Compute the gradient of what was rotated: in one launch, or in torch where it is to be differentiated itself."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.ops.npu.npu_rotary_mul_backward(grad, grad, cos, sin, mode)[0]
    rotated = _quarter_turn(grad.float() * sin, mode == "interleave")
    return (grad.float() * cos - rotated).to(grad.dtype)


def each_twice(table: Tensor) -> Tensor:
    """Repeat each value in a row: ``[c0, c1, ...]`` becomes ``[c0, c0, c1, c1, ...]``."""
    return torch.stack((table, table), -1).flatten(-2)


def first_half(table: Tensor) -> Tensor:
    """View the first half of a table whose halves are the same, ``[..., D]`` to ``[..., D/2]``."""
    return table[..., : table.shape[-1] // 2]


def check(cos: Tensor, sin: Tensor, times: int = 1, partial: bool = False, **rotated: Tensor | None) -> None:
    """Raise unless ``times`` the width of cos is the head size of the tensors, or with partial no more than that."""
    tensors = {name: tensor for name, tensor in rotated.items() if tensor is not None}
    for name, tensor in (tensors | {"cos": cos, "sin": sin}).items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} {list(tensor.shape)} must be floating point, got {tensor.dtype}")
        if tensor.device != cos.device:
            raise ValueError(f"{name} {list(tensor.shape)} is on {tensor.device}, cos on {cos.device}: use one device")
        if not tensor.dim():
            raise ValueError(f"{name} must have a head size, got a tensor of no dimension")
    if sin.shape != cos.shape:
        raise ValueError(f"sin {list(sin.shape)} must have the shape of cos {list(cos.shape)}")
    width = cos.shape[-1] * times
    if width % 2:
        raise ValueError(f"cos {list(cos.shape)} must have an even width: values are rotated in pairs")
    for name, tensor in tensors.items():
        head_size = tensor.shape[-1]
        if not partial and head_size % 2:
            raise ValueError(f"{name} {list(tensor.shape)} must have an even head size: values are rotated in pairs")
        if head_size < width if partial else head_size != width:
            rule = "at most the head size" if partial else "the head size" if times == 1 else "half the head size"
            raise ValueError(f"cos {list(cos.shape)} must have {rule} of {name} {list(tensor.shape)} as its width")


def check_complex(factors: Tensor, name: str, **rotated: Tensor) -> None:
    """Raise unless the factors are complex and half as wide as the tensors."""
    if not factors.is_complex():
        raise TypeError(f"{name} {list(factors.shape)} must be complex, got {factors.dtype}")
    for other, tensor in rotated.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{other} {list(tensor.shape)} must be floating point, got {tensor.dtype}")
        if tensor.dim() != 4:
            raise ValueError(f"{other} {list(tensor.shape)} must have four dimensions")
        if tensor.shape[-1] != 2 * factors.shape[-1]:
            raise ValueError(
                f"{name} {list(factors.shape)} must be half as wide as the head size of {other} {list(tensor.shape)}"
            )


def _multiply_complex(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply with complex numbers in torch."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * factors).flatten(3).type_as(x)


def _rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Compute the same formula in torch, for what the operator does not take."""
    if any(a != b and 1 not in (a, b) for a, b in zip(reversed(x.shape), reversed(cos.shape))):
        raise ValueError(f"cos and sin must broadcast to what is rotated, got {list(cos.shape)} and {list(x.shape)}")
    return x * cos + _quarter_turn(x, interleaved) * sin


def _quarter_turn(x: Tensor, interleaved: bool) -> Tensor:
    """Turn pairs ``[x1, x2]`` by a right angle, into ``[-x2, x1]``."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor | None:
    """Launch the operator in the layout that the memory has, so that nothing is copied; else in another that it takes.

    Returns:
        None where the operator has no layout for the shapes.
    """
    fits, mode = (fits_interleave, "interleave") if interleaved else (fits_half, "half")
    trains_halves = not interleaved and torch.is_grad_enabled() and x.requires_grad
    if x.shape[1] == x.shape[2] == cos.shape[0] == 1:  # one head at one position: the batch stands for heads
        y = _launch(x.transpose(0, 2), cos, sin, interleaved) if x.shape[0] > 1 else None
        if y is not None:
            return y.transpose(0, 2)
    heads_last = x.stride(1) < x.stride(2)  # [B, N, S, D] as a view of [B, S, N, D]
    for swap in (heads_last, not heads_last):
        a, b, c = (t.transpose(1, 2) for t in (x, cos, sin)) if swap else (x, cos, sin)
        if fits(a.shape, b.shape, a.element_size()) and (not trains_halves or fits_half_gradient(a.shape, b.shape)):
            y = _launch_differentiable(a, b, c, mode)
        elif fits_tokens(a.shape, b.shape):
            token_cos, token_sin = (t.expand(*a.shape[:2], 1, a.shape[3]).flatten(0, 1)[None] for t in (b, c))
            y = _launch_differentiable(a.flatten(0, 1)[None], token_cos, token_sin, mode).view(a.shape)
        else:
            continue
        return y.transpose(1, 2) if swap else y
    return None


def _launch_differentiable(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Launch the operator, as a node of autograd where a gradient is needed."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotate.apply(x, cos, sin, mode)
    return torch.ops.npu.npu_rotary_mul(x, cos, sin, mode)


class _Rotate(torch.autograd.Function):
    """Rotates without keeping x, which torch_npu's own node does for the gradients of cos and sin."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.mode = mode
        return torch.ops.npu.npu_rotary_mul(x, cos, sin, mode)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        # the device gives a contiguous gradient, the meta kernel one that lies as grad: graphs trust the latter
        grad = grad.contiguous() if torch.compiler.is_compiling() else grad
        return rotate_back(grad, cos, sin, ctx.mode), None, None, None


def _is_fused(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> bool:
    """Tell whether the operator takes them, if there is a layout for the shapes.

    Where cos or sin need a gradient, torch computes: for those the operator has limits of its own. So it does for
    torch.func and forward-mode derivatives.
    """
    needs_table_grad = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    return (
        x.device.type == "npu"
        and dtype in DTYPES
        and x.dim() in (3, 4)
        and cos.dim() <= x.dim()
        and x.numel() > 0
        and x.shape[-1] < HEAD_SIZE
        and not needs_table_grad
        and not is_distributed(x, cos)
        and not is_transformed()
    )
