"""Products of groups of rows, each with its own matrix, in one launch, with gradients.

``npu_grouped_matmul`` has no derivative and says nothing when one is asked for: the functions here have one. Where the
groups do not reach the last row, the device leaves rows unwritten; ``tail`` says which, and they become zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from .._common.cann import CANN
from .._common.checkpoints import unseen_by_checkpoints
from .._common.derivatives import by_formula, gradients
from .permutation import has_gradients
from .reference import product_in_torch

_FUSED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_GROUPS = 1024
MOST_LISTED = 128  # groups of weights that come as a list
_SIZE = 65536  # every last dimension is less
# the operator counts the elements of a group in 32 bits, of what it reads and of what it writes: CANN's
# ops-transformer, gmm/grouped_matmul/op_kernel/grouped_matmul.h, MMCompute
_GROUP_ELEMENTS = 2**32
_COLUMNS = 16  # of ones, whose product with a gradient is that of a bias: one column would have no layout to tell

_M_AXIS, _K_AXIS = 0, 2  # group_type: the rows of x are grouped, or what is summed over
_COUNTS = 1  # group_list_type
_SINGLE, _SINGLE_K = 2, 3  # split_item: one tensor comes out

# op-plugin 7.1.0, of CANN 8.2, op_plugin/ops/opapi/GroupedMatmulKernelNpuOpApi.cpp: "group_type currently only support
# -1 and 0"; 7.2.0 takes 2, and has the gradients of permutations
_SUMS_GROUPS = CANN >= (8, 3) and has_gradients()
_SUMS_ARE_COUNTED = CANN < (9, 1)  # elements of sums over groups, too: UpdateMnConfig of the same file, 8.5.0 and 9.0.0


def is_empty(rows: Tensor) -> bool:
    """Tell whether there are no rows, which the operator does not take; a graph is for any number of them."""
    return not (torch.compiler.is_compiling() or rows.shape[0])


def fits(x: Tensor, *weights: Tensor) -> bool:
    """Tell whether ``npu_grouped_matmul`` takes rows like ``x`` and weights ``[E, K, N]``, all of as many groups.

    CANN, aclnnGroupedMatmulV4, Atlas A2 and A3: at most 1024 groups, last dimensions below 65536 of every operand as it
    lies and as its gradient needs it, weights contiguous or the transposed view of a contiguous tensor. Nothing empty.
    """
    dtype, device = x.dtype, x.device
    sizes: list[int] = []
    for weight in weights:
        groups, inner, outer = weight.shape
        if not (
            weight.dtype is dtype
            and weight.device == device
            and (weight.stride() == (inner * outer, 1, inner) or weight.is_contiguous() or weight.mT.is_contiguous())
        ):
            return False
        sizes += inner, outer
    return fits_sizes(x, groups, *sizes)


def fits_sizes(x: Tensor, groups: int, *sizes: int) -> bool:
    """Tell :func:`fits` by the number of groups and the other sizes of weights that lie as the operator wants them."""
    return (
        x.device.type == "npu"
        and x.dtype in _FUSED_DTYPES
        and x.numel() > 0
        and 0 < groups <= _MOST_GROUPS
        and min(sizes) > 0
        and max(sizes) < _SIZE
    )


class GmmFunction(torch.autograd.Function):
    """Computes ``x[r] @ weight[e] + bias[e]``, ``[M, N]``, for the rows ``r`` of each group ``e``, one after the other.

    ``apply(x, weight, counts, bias, tail)`` takes ``x`` ``[M, K]`` and ``weight`` ``[E, K, N]``, contiguous or a
    transposed view, of one dtype: float16, bfloat16 or float32. ``counts`` are the rows of each group as int64 ``[E]``
    on the device, ``bias`` is ``[E, N]`` or None, ``tail`` boolean ``[M, 1]``, true for the rows after the last group,
    or None where there are none. Nothing is checked. The gradient of a weight comes out as the weight lies in memory.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor, bias: Tensor | None, tail: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, counts, bias, tail)
        if is_empty(x):
            return product_in_torch(x, weight, counts, bias)
        return multiply(x, weight, counts, bias, tail)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, counts, bias, tail = ctx.saved_tensors
        if by_formula(grad) or is_empty(x):
            inputs = x, weight, counts, bias
            return *gradients(product_in_torch, inputs, ctx.needs_input_grad[:4], grad), None
        needs_x, needs_weight, _, needs_bias, _ = ctx.needs_input_grad
        grad = grad.contiguous()
        d_weight = weight_gradient(x, grad, counts, weight) if needs_weight else None
        d_bias = bias_gradient(grad, counts, bias) if needs_bias else None
        return multiply(grad, weight.mT, counts, None, tail) if needs_x else None, d_weight, None, d_bias, None


def multiply(
    x: Tensor,
    weight: Tensor | list[Tensor],
    counts: Tensor,
    bias: Tensor | None = None,
    tail: Tensor | None = None,
) -> Tensor:
    """Compute what :class:`GmmFunction` does, without a gradient.

    At most 128 weights ``[K, N]`` of float16 or bfloat16 may be a list: they stay where they are.
    """
    if tail is not None:
        with unseen_by_checkpoints():
            return multiply(x, weight, counts, bias).masked_fill_(tail, 0)
    if type(weight) is list and len(weight) == 1:  # that is no list for the operator
        weight = weight[0].unsqueeze(0)
    is_list = type(weight) is list
    is_known = not torch.compiler.is_dynamo_compiling() and isinstance(rows := x.shape[0], int)
    if is_known and rows >= _SIZE and has_long_groups(x, *(sizes := weight[0].shape if is_list else weight.shape[1:])):
        return torch.cat([multiply(x[cut], weight, part, bias) for cut, part in pieces(x, counts, *sizes)])
    if bias is not None:
        bias = added_bias(bias, x.dtype)
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x],
        weight if is_list else [weight],
        bias=None if bias is None else list(bias.unbind()) if is_list else [bias],
        group_list=counts,
        split_item=_SINGLE,
        group_type=_M_AXIS,
        group_list_type=_COUNTS,
    )
    return y


def has_long_groups(x: Tensor, *sizes: int) -> bool:
    """Tell whether ``x`` has rows for a group of more elements of one of the ``sizes`` than the operator counts.

    Fewer than 65536 rows never have, and are not asked. A graph of torch.compile or torch.export is for these: of a
    number of rows that it leaves open, nothing can be asked.
    """
    return x.shape[0] * max(sizes) >= _GROUP_ELEMENTS


def pieces(x: Tensor, counts: Tensor, *sizes: int) -> Iterator[tuple[slice, Tensor]]:
    """Cut the rows of ``x`` so that no group is too long in any piece; yield the rows and the counts of each."""
    if not has_long_groups(x, *sizes):
        yield slice(0, x.shape[0]), counts
        return
    most = (_GROUP_ELEMENTS - 1) // max(sizes)
    ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))  # CANN sums int64 on an AI CPU
    for start in range(0, x.shape[0], most):
        rows = slice(start, min(start + most, x.shape[0]))
        yield rows, ends.clamp(rows.start, rows.stop).diff().long()


def weight_gradient(x: Tensor, grad: Tensor, counts: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x[r]ᵀ @ grad[r]`` of each group, laid out as ``weight``, and zeros for a group without rows."""
    if weight.is_contiguous():
        return sum_over_rows(x, grad, counts)
    return sum_over_rows(grad, x, counts).mT


def bias_gradient(grad: Tensor, counts: Tensor, bias: Tensor) -> Tensor:
    """Sum ``grad`` over the rows of each group, in the dtype of ``bias``: ``[E, N]``."""
    return sum_over_rows(grad.new_ones(grad.shape[0], _COLUMNS), grad, counts)[:, 0].to(bias.dtype)


def sum_over_rows(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Compute ``a[r]ᵀ @ b[r]`` of the rows of each group: of ``[M, K]`` and ``[M, N]`` ``[E, K, N]``.

    torch.compile traces neither a host that waits, nor an operator that returns what it writes to, nor groups that are
    summed over: torch_npu's meta kernel refuses those up to the releases for CANN 8.5, whose operators take them.
    """
    if torch.compiler.is_compiling():
        return _sum_operator(a, b, counts)
    if not _SUMS_GROUPS:
        return _sum_by_adding(a, b, counts)
    if _SUMS_ARE_COUNTED and has_long_groups(a, a.shape[1], b.shape[1]):
        if a.dtype is not torch.float32:
            return _sum_by_adding(a, b, counts)
        parts = pieces(a, counts, a.shape[1], b.shape[1])
        return reduce(torch.add, (sum_over_rows(a[rows], b[rows], part) for rows, part in parts))
    # the operator wants a transposed view of contiguous rows, and contiguous rows
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [a.contiguous().t()],
        [b.contiguous()],
        bias=None,
        group_list=counts,
        split_item=_SINGLE_K,
        group_type=_K_AXIS,
        group_list_type=_COUNTS,
    )
    return y


def _sum_by_adding(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    """Compute :func:`sum_over_rows` where ``npu_grouped_matmul`` sums over no groups.

    ``npu_grouped_matmul_add_`` adds products of 16 bits in float32, which are rounded once then, as the other operator
    rounds: CANN's ops-transformer, gmm/grouped_matmul_add. It takes no float32: for that the host waits for ``counts``.
    """
    groups, inner, outer = counts.shape[0], a.shape[1], b.shape[1]
    if a.dtype is torch.float32:
        sizes = counts.tolist()
        rows = zip(a[: sum(sizes)].split(sizes), b[: sum(sizes)].split(sizes))
        return torch.stack([left.t().mm(right) for left, right in rows])
    total = a.new_zeros(groups * inner, outer, dtype=torch.float32)
    for rows, part in pieces(a, counts, inner, outer):
        ends = part.cumsum(0, dtype=torch.int32).long()  # CANN sums int64 on an AI CPU
        torch.ops.npu.npu_grouped_matmul_add_(total, a[rows].contiguous(), b[rows].contiguous(), ends)
    return total.view(groups, inner, outer).to(a.dtype)


@torch.library.custom_op(f"{__name__.partition('.')[0]}::sum_over_rows", mutates_args=())
def _sum_operator(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    return sum_over_rows(a, b, counts)


@_sum_operator.register_fake
def _(a: Tensor, b: Tensor, counts: Tensor) -> Tensor:
    return a.new_empty(counts.shape[0], a.shape[1], b.shape[1])


def added_bias(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a bias to what the operator adds: float32 to products of bfloat16, otherwise the dtype of the product."""
    return bias.to(torch.float32 if dtype is torch.bfloat16 else dtype)
