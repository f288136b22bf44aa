"""Check what npu_grouped_matmul accepts.

Sources: op-plugin, docs/zh/custom_APIs/torch_npu and GroupedMatmulKernelNpuOpApi.cpp, and CANN's ops-transformer,
gmm/grouped_matmul, docs and op_host/op_api/aclnn_grouped_matmul.cpp. A tensor is transposed if it is the transposed
view of a contiguous one in its last two dimensions; that is how the device tells. Other strides make it copy the
tensor in every call. For one weight of all groups, the largest tensor of a model, they are refused here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, bfloat16, dtype, float16, float32, int8, int32, int64

from softnpu.argument_checks import describe, require, require_dtypes, require_values
from softnpu.cann import require_before

OPERATOR = "npu_grouped_matmul"
NO_GROUPS, ROWS, SUM = -1, 0, 2  # group_type
ENDS, SIZES = 0, 1  # group_list_type
ONE_OUTPUT, OUTPUTS = (2, 3), (0, 1)  # split_item
BIAS_DTYPE = {float16: float16, bfloat16: float32, float32: float32}
MAX_LENGTH = 128  # of a list of tensors, and of a list of ends
MAX_GROUPS = 1024
MAX_INNER = 65535  # of the dimension that is contiguous in memory
MAX_OFFSET = 2**32  # within the rows of a group

Tensors = Sequence[Tensor]


def require_absent(**options: Any) -> None:
    """Refuse arguments that the forms here do not take."""
    for name, value in options.items():
        given = value is not None and not (isinstance(value, (list, tuple)) and not value)
        rule = f"{name} is given, but the software device has no form of the operator that takes it here"
        require(not given, OPERATOR, rule)


def require_dtypes_and_lengths(x: Tensors, weight: Tensors, bias: Tensors | None) -> None:
    for name, tensors in (("x", x), ("weight", weight)):
        rule = f"{name} has {len(tensors)} tensors; the device takes 1 to {MAX_LENGTH}"
        require(1 <= len(tensors) <= MAX_LENGTH, OPERATOR, rule)
    pair = x[0].dtype, weight[0].dtype
    allowed: set[tuple[dtype, ...]] = {(d, d) for d in (*BIAS_DTYPE, int8)} | {(float16, int8), (bfloat16, int8)}
    require_dtypes(OPERATOR, allowed, x=x[0], weight=weight[0])
    for tensors, wanted in ((x, pair[0]), (weight, pair[1])):
        for tensor in tensors:
            require(
                tensor.dtype == wanted, OPERATOR, f"tensors of one list differ in dtype: {wanted}, {describe(tensor)}"
            )
    for tensor in bias or []:
        wanted = int32 if pair[0] == int8 else BIAS_DTYPE[pair[0]]
        require(tensor.dtype == wanted, OPERATOR, f"the bias of {pair[0]} must be {wanted}, got {describe(tensor)}")


def require_group_type(group_type: int | None, split: int, group_list_type: int) -> None:
    require(group_type is not None, OPERATOR, "Requires manual passing group_type, current is None.")
    known = group_type in (NO_GROUPS, ROWS, SUM)
    require(known, OPERATOR, f"The group type must be -1, 0 or 2, but now is [{group_type}]")
    # op-plugin 7.1.0, op_plugin/ops/opapi/GroupedMatmulKernelNpuOpApi.cpp, line 242
    require_before((8, 3), group_type != SUM, OPERATOR, "group_type currently only support -1 and 0")
    allowed = OUTPUTS if group_type == NO_GROUPS else ONE_OUTPUT
    require(split in allowed, OPERATOR, f"split_item is {split}; group_type {group_type} takes {allowed}")
    rule = f"group_list_type is {group_list_type}; floating-point tensors take {ENDS}, ends, or {SIZES}, sizes"
    require(group_list_type in (ENDS, SIZES), OPERATOR, rule)


def require_pairs(x: Tensors, weight: Tensors, group_list: Tensor | None) -> None:
    """Check group_type -1: as many weights as x, each with its own shape."""
    require(group_list is None, OPERATOR, "group_type -1 takes no group_list")
    require(len(x) == len(weight), OPERATOR, f"{len(x)} tensors x and {len(weight)} weights: group_type -1 pairs them")
    for rows in x:
        require(2 <= rows.dim() <= 6, OPERATOR, f"x must have 2 to 6 dimensions, got {describe(rows)}")
    _require_single_float32(x)
    _require_weights(weight, 2)
    _require_not_transposed("x", x)
    _require_factors(x, weight)


def require_rows(x: Tensors, weight: Tensors) -> None:
    """Check group_type 0: one x, or one a group."""
    single = len(weight) == 1
    _require_dims("x", x, 2)
    _require_weights(weight, 3 if single else 2)
    _require_single_float32(x)
    _require_not_transposed("x", x)
    if len(x) > 1 or not single:
        fits = len(x) in (1, len(weight)) and not single
        require(fits, OPERATOR, f"{len(x)} tensors x and {len(weight)} weights: take one x, or one for each weight")
        _require_one_width(weight)
    _require_factors(x, weight)


def require_sum(x: Tensors, weight: Tensors, bias: Tensors | None) -> None:
    """Check group_type 2: one transposed x and one weight as it is."""
    require(not bias, OPERATOR, "group_type 2 takes no bias")
    single = len(x) == len(weight) == 1
    require(single, OPERATOR, f"{len(x)} tensors x and {len(weight)} weights: group_type 2 takes one of each")
    _require_dims("x", x, 2)
    _require_dims("weight", weight, 2)
    rule = f"group_type 2 takes x as the transposed view of a contiguous tensor, x.t(), got {_strided(x[0])}"
    require(transposed(x[0]), OPERATOR, rule)
    _require_not_transposed("weight", weight)
    _require_factors(x, weight)


def require_list(x: Tensors, weight: Tensors, ends: Sequence[int], split: int) -> list[int]:
    """Check the overload with a list of ends, and return the sizes of its groups."""
    require(split in OUTPUTS + ONE_OUTPUT, OPERATOR, f"split_item is {split}; the device takes 0 to 3")
    require(x[0].dtype != float32, OPERATOR, "with a list of ends the device takes float16 and bfloat16 only")
    require(
        len(ends) <= MAX_LENGTH, OPERATOR, f"group_list has {len(ends)} ends; the device takes at most {MAX_LENGTH}"
    )
    require(len(ends) != 1, OPERATOR, "group_list has one end; leave it out for one group")
    if split in OUTPUTS and not ends:
        for rows in x:
            require(2 <= rows.dim() <= 6, OPERATOR, f"x must have 2 to 6 dimensions, got {describe(rows)}")
    else:
        _require_dims("x", x, 2)
    _require_weights(weight, 2)
    _require_not_transposed("x", x)
    if split in ONE_OUTPUT:
        _require_one_width(weight)
    _require_factors(x, weight)
    if len(x) == len(weight):
        sizes = [rows.shape[0] for rows in x]
        if split in OUTPUTS:
            require(not ends, OPERATOR, "a list of x with a list of results takes no group_list")
            rule = "a list of x with a list of results takes no transposed weight"
            require(not any(map(transposed, weight)), OPERATOR, rule)
        elif ends:
            given = f"group_list {list(ends)} and x of {sizes} rows"
            require(_differences(ends) == sizes, OPERATOR, f"{given}: they must be the same groups")
        return sizes
    given = f"{len(x)} tensors x, {len(weight)} weights and {len(ends)} ends"
    require(len(x) == 1 and len(weight) == len(ends), OPERATOR, f"{given}: take one x and as many weights as ends")
    sizes = _checked(_differences(ends), x[0].shape[0])
    rule = f"the last end must be the number of rows, got {list(ends)} for x {describe(x[0])}"
    require(sum(sizes) == x[0].shape[0], OPERATOR, rule)
    return sizes


def group_sizes(group_list: Tensor | None, kind: int, groups: int | None, total: int) -> list[int]:
    """Return the sizes of the groups in a group_list on the device; ``groups`` is their number, if the weights tell."""
    if group_list is None:
        raise RuntimeError(f"{OPERATOR}: group_type {ROWS} and {SUM} need a group_list")
    rule = f"group_list must be int64 and have 1 dimension, got {describe(group_list)}"
    require(group_list.dtype == int64 and group_list.dim() == 1, OPERATOR, rule)
    count = group_list.numel()
    require(1 <= count <= MAX_GROUPS, OPERATOR, f"{count} groups; the device takes 1 to {MAX_GROUPS}")
    if groups is not None:
        require(count == groups, OPERATOR, f"group_list has {count} groups and the weights have {groups}")
    values = group_list.tolist()
    return _checked(values if kind == SIZES else _differences(values), total)


def require_sizes_of_x(x: Tensors, sizes: list[int]) -> None:
    found = [rows.shape[0] for rows in x]
    require(
        len(x) == 1 or found == sizes, OPERATOR, f"group_list says {sizes} rows a group, the tensors x have {found}"
    )


def require_offsets(sizes: Sequence[int], weight: Tensors) -> None:
    """Refuse a group of rows behind whose 2**32nd element the device reads and writes at the wrong place.

    It counts them in 32 bits: gmm/grouped_matmul/op_kernel/grouped_matmul.h, ``MMCompute``. That of int8 was not read.
    """
    if weight[0].dtype == int8:
        return
    widths = [max(w.shape[-2:]) for w in (weight[0] if weight[0].dim() == 3 else weight)]
    for size, width in zip(sizes, widths):
        rule = f"a group has {size} rows of {width} elements; the device takes fewer than 2**32 elements a group"
        require_values(size * width < MAX_OFFSET, OPERATOR, rule)


def require_offsets_of_sums(operator: str, sizes: Sequence[int], width: int) -> None:
    """Refuse a group whose sum is so long that the device finds those behind it at the wrong place.

    It counts the elements in 32 bits: ``UpdateMnConfig`` of the same file and of gmm/grouped_matmul_add, before 9.1.
    """
    for size in sizes[:-1]:
        rule = f"sums over {size} rows of {width} elements; the device takes fewer than 2**32 elements before the last"
        require_before((9, 1), size * width < MAX_OFFSET, operator, rule)


def biases(weight: Tensors, bias: Tensors | None) -> list[Tensor | None]:
    """Return one bias a group: [E, N] for one weight [E, K, N], else a list of [N]."""
    if weight[0].dim() == 3:
        groups, _, width = weight[0].shape
        if not bias:
            return [None] * groups
        fits = len(bias) == 1 and list(bias[0].shape) == [groups, width]
        given = [describe(b) for b in bias]
        require(fits, OPERATOR, f"the bias must be one tensor of shape {[groups, width]}, got {given}")
        return list(bias[0])
    if not bias:
        return [None] * len(weight)
    wanted = [[w.shape[1]] for w in weight]
    found = [list(b.shape) for b in bias]
    require(found == wanted, OPERATOR, f"the biases must have the shapes {wanted}, got {found}")
    return list(bias)


def transposed(tensor: Tensor) -> bool:
    """Tell whether the last two dimensions are those of a contiguous tensor, swapped."""
    return tensor.stride(-2) == 1 and tensor.stride(-1) == tensor.shape[-2] and tensor.mT.is_contiguous()


def _differences(ends: Sequence[int]) -> list[int]:
    return [end - start for start, end in zip([0, *ends], ends)]


def _checked(sizes: list[int], total: int) -> list[int]:
    require(min(sizes) >= 0, OPERATOR, f"group_list has a negative element or, as ends, decreases: sizes {sizes}")
    require(sum(sizes) <= total, OPERATOR, f"the groups have {sum(sizes)} elements, more than the {total} of x")
    return sizes


def _require_factors(x: Tensors, weight: Tensors) -> None:
    """Refuse inner sizes that differ, and a dimension in memory that is too long."""
    for index, w in enumerate(weight):
        rows = x[index] if len(x) > 1 else x[0]
        given = f"x {describe(rows)} and weight {describe(w)}"
        require(rows.shape[-1] == w.shape[-2], OPERATOR, f"{given} differ in the size K of the sum")
    for name, tensors in (("x", x), ("weight", weight)):
        for tensor in tensors:
            inner = tensor.shape[-2] if transposed(tensor) else tensor.shape[-1]
            rule = (
                f"{name} {describe(tensor)} has {inner} elements in its last dimension in memory; at most {MAX_INNER}"
            )
            require(inner <= MAX_INNER, OPERATOR, rule)


def _require_weights(weight: Tensors, dims: int) -> None:
    _require_dims("weight", weight, dims)
    for w in weight:
        same = transposed(w) == transposed(weight[0])
        require(same, OPERATOR, "either all weights are transposed or none is")
    if dims == 3:
        rule = f"weight must be contiguous or the transposed view of a contiguous tensor, got {_strided(weight[0])}"
        require(weight[0].is_contiguous() or transposed(weight[0]), OPERATOR, rule)


def _require_dims(name: str, tensors: Tensors, dims: int) -> None:
    for tensor in tensors:
        require(tensor.dim() == dims, OPERATOR, f"{name} must have {dims} dimensions here, got {describe(tensor)}")


def _require_not_transposed(name: str, tensors: Tensors) -> None:
    for tensor in tensors:
        fine = not transposed(tensor) or tensor.shape[-1] * tensor.shape[-2] == 1
        require(fine, OPERATOR, f"{name} must not be transposed here, got {_strided(tensor)}")


def _require_one_width(weight: Tensors) -> None:
    widths = sorted({w.shape[1] for w in weight})
    require(len(widths) == 1, OPERATOR, f"the weights of one result must have one size N, got {widths}")


def _require_single_float32(x: Tensors) -> None:
    """Refuse several float32 x. op-plugin's page wants one weight too; its own tests give one x several."""
    require(x[0].dtype != float32 or len(x) == 1, OPERATOR, "float32 takes one x")


def _strided(tensor: Tensor) -> str:
    return f"{describe(tensor)} with strides {list(tensor.stride())}"
