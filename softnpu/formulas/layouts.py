"""Define the older operators that lay tensors out anew: each result is a copy in the order it says.

op-plugin, op_plugin/ops/aclops/{Transpose,Reshape,Slice,Pad,Broadcast,ConfusionTranspose,Max,Min}KernelNpu.cpp.
"""

from __future__ import annotations

import math

from torch import Tensor, int32
from torch.nn import functional as F

from softnpu.argument_checks import describe, require
from softnpu.formulas import formula, named_formula


@formula
def npu_transpose(input: Tensor, perm: list[int], require_contiguous: bool = True) -> Tensor:
    """Permute the dimensions."""
    return input.permute(perm).clone()


@formula
def npu_reshape(input: Tensor, shape: list[int], can_refresh: bool = False) -> Tensor:
    """Give the elements another shape."""
    return input.reshape(shape).clone()


@formula
def npu_slice(input: Tensor, offsets: list[int], size: list[int]) -> Tensor:
    """Take ``size`` elements of every dimension from ``offsets`` on; -1 takes the rest."""
    operator = "npu_slice"
    fits = len(offsets) == len(size) == input.dim()
    require(fits, operator, f"offsets and size must have {input.dim()} numbers, got {offsets} and {size}")
    for dim, (start, count) in enumerate(zip(offsets, size)):
        count = input.shape[dim] - start if count == -1 else count
        inside = start >= 0 and count >= 0 and start + count <= input.shape[dim]
        require(inside, operator, f"{count} elements from {start} on are not in {describe(input)}")
        input = input.narrow(dim, start, count)
    return input.clone()


@formula
def npu_pad(input: Tensor, paddings: list[int]) -> Tensor:
    """Put zeros before and behind every dimension: a pair each, that of the first dimension first."""
    require(len(paddings) == 2 * input.dim(), "npu_pad", f"paddings must be a pair a dimension, got {paddings}")
    pairs = [paddings[i : i + 2] for i in range(0, len(paddings), 2)]
    return F.pad(input, [n for pair in reversed(pairs) for n in pair])


@formula
def npu_broadcast(input: Tensor, size: list[int]) -> Tensor:
    """Repeat the dimensions of size one."""
    return input.expand(size).clone()


@formula
def npu_confusion_transpose(input: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    """Permute and then reshape, or the other way round."""
    return input.permute(perm).reshape(shape) if transpose_first else input.reshape(shape).permute(perm)


@formula
def npu_confusion_transpose_backward(grad: Tensor, perm: list[int], shape: list[int], transpose_first: bool) -> Tensor:
    """Undo npu_confusion_transpose of an input of ``shape``. torch_npu hands the opposite of its transpose_first on."""
    inverse = sorted(range(len(perm)), key=perm.__getitem__)
    if transpose_first:
        return grad.permute(inverse).reshape(shape)
    return grad.reshape([shape[i] for i in perm]).permute(inverse)


@named_formula("npu_max.dim")
def npu_max(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the largest elements and their places, int32."""
    values, indices = input.max(dim, keepdim)
    return values, indices.to(int32)


@named_formula("npu_min.dim")
def npu_min(input: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the smallest elements and their places, int32."""
    values, indices = input.min(dim, keepdim)
    return values, indices.to(int32)


@formula
def npu_max_backward(grad: Tensor, dim: int, indices: Tensor, sizes: list[int], keepdim: bool) -> Tensor:
    """Put the gradient where the largest elements were."""
    return _placed(grad, dim, indices, sizes, keepdim)


@formula
def npu_min_backward(grad: Tensor, dim: int, indices: Tensor, sizes: list[int], keepdim: bool) -> Tensor:
    """Put the gradient where the smallest elements were."""
    return _placed(grad, dim, indices, sizes, keepdim)


def _placed(grad: Tensor, dim: int, indices: Tensor, sizes: list[int], keepdim: bool) -> Tensor:
    if not keepdim and sizes:
        grad, indices = grad.unsqueeze(dim), indices.unsqueeze(dim)
    return grad.new_zeros(sizes).scatter_(dim, indices.long(), grad)


@formula
def npu_bmmV2(input: Tensor, mat2: Tensor, output_sizes: list[int]) -> Tensor:  # noqa: N802  the schema's name
    """Multiply matrices, and give the product the shape ``output_sizes`` if there is one."""
    out = (input.float() @ mat2.float()).to(input.dtype)
    if not output_sizes:
        return out
    fits = math.prod(output_sizes) == out.numel()
    require(fits, "npu_bmmV2", f"output_sizes {output_sizes} do not hold {list(out.shape)}")
    return out.reshape(output_sizes)


@formula
def one_(input: Tensor) -> Tensor:
    """Fill with ones."""
    return input.fill_(1)
