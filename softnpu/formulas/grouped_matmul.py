"""Define grouped matrix products: one product a group, over rows of x (M) or over parts of the sum (K).

Limits: softnpu/formulas/grouped_matmul_limits.py; the arithmetic, of floating-point tensors and of int8:
grouped_matmul_quantised.py. Products are summed in float32 and rounded once, with the bias added before, as the matrix
unit does. What no group covers stays unwritten, here NaN, and so does
everything if all of x is empty. The kernel reads group_list on the device: the host does not wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from softnpu.argument_checks import describe, require, require_dtypes
from softnpu.formulas import formula, named_formula
from softnpu.formulas import grouped_matmul_limits as limits
from softnpu.formulas.cast import as_torch_dtype
from softnpu.formulas.grouped_matmul_quantised import Arithmetic, arithmetic

Tensors = Sequence[Tensor]


@formula
def npu_grouped_matmul(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Tensors | None = None,
    scale: Tensors | None = None,
    offset: Tensors | None = None,
    antiquant_scale: Tensors | None = None,
    antiquant_offset: Tensors | None = None,
    per_token_scale: Tensors | None = None,
    group_list: Tensor | None = None,
    activation_input: Tensors | None = None,
    activation_quant_scale: Tensors | None = None,
    activation_quant_offset: Tensors | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    tuning_config: Sequence[int] | None = None,
    output_dtype: int | None = None,
    x_dtype: int | None = None,
    weight_dtype: int | None = None,
    scale_dtype: int | None = None,
    per_token_scale_dtype: int | None = None,
) -> list[Tensor]:
    """Multiply in groups. group_list, int64 [E], holds the sizes of the groups (group_list_type
    1) or where they end (0, the default).

    group_type 0: rows of ``x [M, K]`` times ``weight [E, K, N]``, or E weights [K, N], to one [M, N]; x may be a list
    as well, one tensor a group, then group_list may be left out. 2: parts of the sum, ``x [M, K]`` times
    ``weight [K, N]`` to one [E, M, N], zero for an empty group. -1: lists of x [..., K_i] and weights [K_i, N_i] to a
    list, without group_list. The bias is one [E, N], or E tensors [N] for E weights.

    x and weight of int8 take a scale a column, and one a row as per_token_scale; a weight of int8 alone takes
    antiquant_scale and antiquant_offset, one a column.
    """
    limits.require_absent(
        offset=offset,
        activation_input=activation_input,
        activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
        tuning_config=None if x[:1] and x[0].dtype == torch.int8 else tuning_config,
        x_dtype=x_dtype,
        weight_dtype=weight_dtype,
        scale_dtype=scale_dtype,
        per_token_scale_dtype=per_token_scale_dtype,
    )
    split, counts = split_item or 0, group_list_type or 0
    limits.require_group_type(group_type, split, counts)
    limits.require_dtypes_and_lengths(x, weight, bias)
    dtype = None if output_dtype is None else as_torch_dtype(limits.OPERATOR, output_dtype)
    how = arithmetic(x, weight, scale, per_token_scale, antiquant_scale, antiquant_offset, dtype, act_type or 0)
    if group_type == limits.NO_GROUPS:
        limits.require_pairs(x, weight, group_list)
        limits.require_offsets([rows.shape[:-1].numel() for rows in x], weight)
        return _each(x, weight, bias, how)
    if group_type == limits.SUM:
        limits.require_sum(x, weight, bias)
        require(weight[0].dtype != torch.int8, limits.OPERATOR, "group_type 2 takes no int8")
        sizes = limits.group_sizes(group_list, counts, None, total=x[0].shape[1])
        limits.require_offsets_of_sums(limits.OPERATOR, sizes, max(x[0].shape[0], weight[0].shape[1]))
        covered = sum(sizes)
        parts = zip(x[0][:, :covered].split(sizes, 1), weight[0][:covered].split(sizes))
        y = torch.stack([how.product(i, 0, left, right, None) for i, (left, right) in enumerate(parts)])
        return [y if x[0].numel() else torch.full_like(y, math.nan)]
    limits.require_rows(x, weight)
    groups = weight[0].shape[0] if weight[0].dim() == 3 else len(weight)
    if group_list is None and len(x) == groups > 1:
        sizes = [len(rows) for rows in x]
    else:
        sizes = limits.group_sizes(group_list, counts, groups, total=sum(len(rows) for rows in x))
        limits.require_sizes_of_x(x, sizes)
    limits.require_offsets(sizes, weight)
    return [_one_output(x, weight, bias, sizes, how)]


@named_formula("npu_grouped_matmul.List")
def npu_grouped_matmul_list(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Tensors | None = None,
    scale: Tensors | None = None,
    offset: Tensors | None = None,
    antiquant_scale: Tensors | None = None,
    antiquant_offset: Tensors | None = None,
    per_token_scale: Tensors | None = None,
    group_list: Sequence[int] | None = None,
    activation_input: Tensors | None = None,
    activation_quant_scale: Tensors | None = None,
    activation_quant_offset: Tensors | None = None,
    split_item: int | None = 0,
    group_type: int | None = None,
    group_list_type: int | None = 0,
    act_type: int | None = 0,
    output_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Multiply rows of x with weights [K, N], the ends of the groups given on the host; the last is the end of x.

    split_item 0 and 1 return a tensor a group, 2 and 3 one tensor. x is one tensor or, as the weights, one a group;
    a list of x with a list of results has no group_list, and takes x of 2 to 6 dimensions.
    """
    limits.require_absent(
        offset=offset,
        per_token_scale=per_token_scale,
        activation_input=activation_input,
        activation_quant_scale=activation_quant_scale,
        activation_quant_offset=activation_quant_offset,
        act_type=act_type or None,
        group_type=group_type,
        group_list_type=group_list_type or None,
    )
    limits.require_dtypes_and_lengths(x, weight, bias)
    sizes = limits.require_list(x, weight, group_list or [], split_item or 0)
    limits.require_offsets(sizes, weight)
    how = arithmetic(x, weight, scale, None, antiquant_scale, antiquant_offset, output_dtype, 0)
    if (split_item or 0) in limits.ONE_OUTPUT:
        return [_one_output(x, weight, bias, sizes, how)]
    return _each(x[0].split(sizes) if len(x) < len(weight) else x, weight, bias, how)


def _each(x: Tensors, weight: Tensors, bias: Tensors | None, how: Arithmetic) -> list[Tensor]:
    """Compute a product a group, each in a tensor of its own."""
    starts = [0, *accumulate(rows.shape[:-1].numel() for rows in x)]
    parts = zip(starts, x, weight, limits.biases(weight, bias))
    results = [how.product(i, start, rows, w, b) for i, (start, rows, w, b) in enumerate(parts)]
    return results if any(rows.numel() for rows in x) else [torch.full_like(y, _unwritten(y.dtype)) for y in results]


def _one_output(x: Tensors, weight: Tensors, bias: Tensors | None, sizes: list[int], how: Arithmetic) -> Tensor:
    """Compute [M, N], the products of all groups below each other."""
    rows, covered = torch.cat(list(x)), sum(sizes)
    weights = list(weight[0]) if weight[0].dim() == 3 else weight
    y = rows.new_full((rows.shape[0], weights[0].shape[-1]), _unwritten(how.dtype), dtype=how.dtype)
    starts = [0, *accumulate(sizes)]
    parts = zip(starts, y[:covered].split(sizes), rows[:covered].split(sizes), weights, limits.biases(weight, bias))
    for i, (start, out, part, w, b) in enumerate(parts):
        if part.numel():
            out.copy_(how.product(i, start, part, w, b))
    return y


def _unwritten(dtype: torch.dtype) -> float:
    """Return what stands for memory that nobody wrote."""
    return math.nan if dtype.is_floating_point else -1


@formula
def npu_grouped_matmul_add(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    """Add to ``input [E · K, N]`` or [E, K, N], float32, and return a copy of it: it is written all the same.

    Everything else as in npu_grouped_matmul_add_.
    """
    options = transpose_x, transpose_weight, group_type, group_list_type or 0
    return _added("npu_grouped_matmul_add", input, x, weight, group_list, *options).clone()


@formula
def npu_grouped_matmul_add_(
    input: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    *,
    transpose_x: bool = True,
    transpose_weight: bool = False,
    group_type: int = 2,
    group_list_type: int | None = 0,
) -> Tensor:
    """Add ``xᵀ · weight`` of the rows of every group, x [M, K] and weight [M, N], 16 bits, in float32.

    group_list holds where the groups end. op-plugin, GroupedMatmulAddKernelNpuOpApi.cpp and its test; on A2
    and A3 it does not pass group_list_type on, so that only ends are taken here.
    """
    options = transpose_x, transpose_weight, group_type, group_list_type or 0
    return _added("npu_grouped_matmul_add_", input, x, weight, group_list, *options)


def _added(
    operator: str,
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    group_list: Tensor,
    transpose_x: bool,
    transpose_weight: bool,
    group_type: int,
    group_list_type: int,
) -> Tensor:
    rule = "takes transpose_x=True, transpose_weight=False, group_type=2 and group_list_type=0"
    given = transpose_x, transpose_weight, group_type, group_list_type
    require(given == (True, False, limits.SUM, limits.ENDS), operator, f"{rule}, got {given}")
    allowed: set[tuple[torch.dtype, ...]] = {(torch.float32, d, d) for d in (torch.float16, torch.bfloat16)}
    require_dtypes(operator, allowed, input=y, x=x, weight=weight)
    fits = x.dim() == weight.dim() == 2 and len(x) == len(weight)
    require(fits, operator, f"needs x [M, K] and weight [M, N], got {describe(x)} and {describe(weight)}")
    sizes = limits.group_sizes(group_list, limits.ENDS, None, total=len(x))
    limits.require_offsets_of_sums(operator, sizes, max(x.shape[1], weight.shape[1]))
    shape = [len(sizes), x.shape[1], weight.shape[1]]
    fits = y.is_contiguous() and list(y.shape) in (shape, [shape[0] * shape[1], shape[2]])
    require(fits, operator, f"input must be contiguous and hold {shape}, got {describe(y)}")
    covered = sum(sizes)
    parts = zip(y.view(shape), x[:covered].split(sizes), weight[:covered].split(sizes))
    for total, left, right in parts:
        total.add_(left.float().T @ right.float())
    return y
