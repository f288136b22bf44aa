"""Define MoE routing for inference: rows in the order of their experts, and their weighted sums, without gradients.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu, and CANN's ops-transformer,
moe/moe_init_routing_v3 and moe/moe_finalize_routing_v2, op_host; rounding: op_kernel there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, bfloat16, float16, float32, int8, int32, int64

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.cann import require_before
from softnpu.formulas import formula

COUNTS, PAIRS = 1, 2  # expert_tokens_num_type
GATHER, SCATTER = 0, 1  # row_idx_type
UNQUANTISED, DYNAMIC = -1, 1  # quant_mode
MAX_EXPERTS = {COUNTS: 10240, PAIRS: 5120}
UNWRITTEN = -1  # of integers, which have no NaN
FINALIZE_DTYPES: set[tuple[torch.dtype, ...]] = {
    (float16, float16),
    (float32, float32),
    (bfloat16, bfloat16),
    (bfloat16, float32),
}
BY_COLUMNS, PADDED = (0, 1), (1, 3)  # drop_pad_mode


@formula
def npu_moe_init_routing(
    x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the first ``min(T, active_num) · K`` rows of x [T, H] in the stable order of ``expert_idx [T, K]``, where
    every token and slot went, and the sorted experts.

    row_idx [T, K] numbers the slots, ``j · T + t``; the row of a number is its remainder by T.
    """
    operator = "npu_moe_init_routing"
    require_dtypes(operator, {(d, int32, int32) for d in FLOATING}, x=x, row_idx=row_idx, expert_idx=expert_idx)
    fits = x.dim() == expert_idx.dim() == 2 and len(x) == len(expert_idx) and row_idx.shape == expert_idx.shape
    given = f"x {describe(x)}, row_idx {describe(row_idx)} and expert_idx {describe(expert_idx)}"
    require(fits, operator, f"needs [T, H], [T, K] and [T, K], got {given}")
    require(max(x.shape) < 2**24, operator, f"the sizes of x must be below 2^24, got {describe(x)}")
    require(active_num >= 0, operator, f"active_num must not be negative, got {active_num}")
    count = expert_idx.numel()
    numbers = torch.equal(row_idx.flatten().sort().values, torch.arange(count, dtype=int32))
    require(numbers, operator, f"row_idx must hold every number below {count} once")
    experts, order = expert_idx.flatten().sort(stable=True)
    source = row_idx.flatten()[order].long()
    places = torch.empty(count, dtype=int32)
    places[source] = torch.arange(count, dtype=int32)
    active = min(active_num, len(x)) * expert_idx.shape[1]
    return x[source[:active] % len(x)], places, experts


@formula
def npu_moe_init_routing_v2(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = UNQUANTISED,
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = GATHER,
    x_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows of x [T, H] for the experts in active_expert_range, by default all, in the stable order of
    ``expert_idx [T, K]``, int32; where they went; how many every expert has, int64; and their scales, float32 [T·K].

    row_idx_type 0 names the row of every token and slot, -1 for those of other experts; 1 names the token and slot,
    ``t · K + j``, of every row, behind them of the other experts. A positive active_num allocates and writes that many
    rows at most; indices and counts do not change (op-plugin's page; older CANN refuses any but all of them, see
    moe_init_routing_v3_tiling.cpp). expert_tokens_num_type 1 counts rows for every expert in range, 2 gives pairs
    [expert_num, 2] of an expert with rows and their number, then zeros. Rows, scales and pairs beyond the last stay
    unwritten, here NaN or -1.

    drop_pad_mode 1 gives every expert expert_capacity rows, [expert_num, C, H], and as many scales: further rows are
    dropped, their index is -1, and rows that are missing are zeros. quant_mode 1 quantises every row to int8 by its
    largest element, after a scale [1, H] or one for every expert in range, and returns the steps as scales.
    """
    operator = "npu_moe_init_routing_v2"
    padded, quantised = drop_pad_mode == 1, quant_mode == DYNAMIC
    if quant_mode not in (UNQUANTISED, DYNAMIC) or offset is not None or x_dtype is not None:
        raise NotImplementedError(f"{operator}: the software device has the forms with quant_mode -1 and 1 only")
    dtypes = FLOATING if quantised else (*FLOATING, int8)
    require_dtypes(operator, {(d, int32) for d in dtypes}, x=x, expert_idx=expert_idx)
    require(drop_pad_mode in (0, 1), operator, f"drop_pad_mode is {drop_pad_mode}; the device takes 0 or 1")
    fits = x.dim() == 2 and expert_idx.dim() == 2 and len(x) == len(expert_idx)
    given = f"x {describe(x)} and expert_idx {describe(expert_idx)}"
    require(fits, operator, f"{given} must have 2 dimensions and the same number of rows")
    require(active_num >= -1, operator, f"active_num should be greater than or equal to -1, got {active_num}")
    rule = f"active_num must be all {expert_idx.numel()} rows that x expands to, got {active_num}"
    require_before((9, 0), active_num == expert_idx.numel(), operator, rule)
    kind = expert_tokens_num_type
    counted = kind in (COUNTS, PAIRS) and expert_tokens_num_flag
    require(
        counted, operator, "the device takes expert_tokens_num_type 1 and 2, with expert_tokens_num_flag=True, only"
    )
    require(row_idx_type in (GATHER, SCATTER), operator, f"row_idx_type is {row_idx_type}; the device takes 0 or 1")
    limit = MAX_EXPERTS[kind]
    require(1 <= expert_num <= limit, operator, f"expert_num is {expert_num}; the device takes 1 to {limit}")
    start, end = active_expert_range or (0, expert_num)
    rule = f"active_expert_range [{start}, {end}) must be some of {expert_num} experts"
    require(0 <= start < end <= expert_num, operator, rule)
    if len(x) == 0:  # op-plugin returns before it looks at more
        counts = torch.zeros((expert_num, 2) if kind == PAIRS else end - start, dtype=int64)
        dtype = int8 if quantised else x.dtype
        return x.new_empty(0, x.shape[1], dtype=dtype), expert_idx.new_empty(0), counts, torch.empty(0)
    if padded:
        plain = kind == COUNTS and row_idx_type == GATHER and (start, end) == (0, expert_num)
        rule = "drop_pad_mode 1 takes all experts, expert_tokens_num_type 1 and row_idx_type 0"
        require(plain, operator, rule)
        rule = f"expert_capacity must be above 0 and below the {len(x)} rows, got {expert_capacity}"
        require(0 < expert_capacity < len(x), operator, rule)
        # CANN's ops-transformer, moe/moe_init_routing_v3/op_host/moe_init_routing_v3_tiling.cpp 8.5.0:292
        require_before((9, 0), False, operator, "drop_pad_mode currently support 0")
    if scale is not None:
        shapes = [[1, x.shape[1]], [end - start, x.shape[1]]] if quantised else [[len(x)]]
        fits = scale.dtype == float32 and list(scale.shape) in shapes
        require(fits, operator, f"scale must be float32 {' or '.join(map(str, shapes))}, got {describe(scale)}")

    flat = expert_idx.flatten().long()
    known = bool(((flat >= 0) & (flat < expert_num)).all())
    require(known, operator, f"expert_idx has a number outside of [0, {expert_num})")
    order = torch.argsort(flat, stable=True)
    order = order[(flat[order] >= start) & (flat[order] < end)]
    counts = torch.bincount(flat, minlength=expert_num)[start:end]
    if padded:
        ranks = torch.arange(len(order)) - (counts.cumsum(0) - counts)[flat[order]]
        places = flat[order] * expert_capacity + ranks
        order, places = order[ranks < expert_capacity], places[ranks < expert_capacity]
        row_idx = torch.full(flat.shape, UNWRITTEN, dtype=int32)
        row_idx[order] = places.to(int32)
        values, steps = _rows(x, order // expert_idx.shape[1], flat[order], scale, quantised)
        expanded = torch.zeros(expert_num * expert_capacity, x.shape[1], dtype=values.dtype)
        expanded[places] = values
        scales = torch.full((len(expanded),), math.nan if steps is None else 0.0)
        if steps is not None:
            scales[places] = steps
        return expanded.view(expert_num, expert_capacity, -1), row_idx, counts, scales
    if row_idx_type == GATHER:
        row_idx = torch.full(flat.shape, UNWRITTEN, dtype=int32)
        row_idx[order] = torch.arange(len(order), dtype=int32)
    else:  # the whole order, with the experts below the range last
        row_idx = torch.argsort(flat.masked_fill(flat < start, expert_num), stable=True).to(int32)
    size = min(active_num, flat.numel()) if active_num > 0 else flat.numel()
    order = order[:size]
    rows, tokens = len(order), order // max(expert_idx.shape[1], 1)
    values, steps = _rows(x, tokens, flat[order] - start, scale, quantised)
    unwritten = UNWRITTEN if values.dtype == int8 else math.nan
    expanded = torch.full((size, x.shape[1]), unwritten, dtype=values.dtype)
    expanded[:rows] = values
    scales = torch.full((size,), math.nan)
    if steps is not None:
        scales[:rows] = steps
    return expanded, row_idx, counts if kind == COUNTS else _pairs(counts, start, expert_num), scales


@formula
def npu_moe_finalize_routing(
    expanded_permuted_rows: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    expanded_src_to_dst_row: Tensor,
    export_for_source_row: Tensor | None,
    drop_pad_mode: int | None = 0,
    k: int | None = 1,
) -> Tensor:
    """Compute ``skip1 + skip2 + Σ_j scales[t, j] · (rows[index] + bias[expert])`` for T tokens and K slots: [T, H].

    rows are [T·K, H] in drop_pad_mode 0 and 2, or [E, C, H] in 1 and 3, where the index -1 stands for a row of zeros.
    The index of token t and slot j is at ``j · T + t`` in modes 0 and 1, at ``t · K + j`` in 2 and 3. Without scales
    they are 1 and K is 1. bfloat16, whose scales may be float32, is summed in float32 and rounded once; float16 rounds
    after every step.
    """
    operator, mode = "npu_moe_finalize_routing", drop_pad_mode or 0
    rows, index, experts = expanded_permuted_rows, expanded_src_to_dst_row, export_for_source_row
    require(mode in range(4), operator, f"drop_pad_mode is {drop_pad_mode}; the device takes 0 to 3")
    require(k in (None, 1), operator, "the software device has no form of the operator with k")
    require_dtypes(operator, {(d, int32) for d in FLOATING}, rows=rows, expanded_src_to_dst_row=index)
    dims = 3 if mode in PADDED else 2
    require(rows.dim() == dims, operator, f"drop_pad_mode {mode} takes rows of {dims} dimensions, got {describe(rows)}")
    tokens, slots = (index.numel(), 1) if scales is None else tuple(scales.shape)
    hidden = rows.shape[-1]
    _require_finalize(operator, rows, [tokens, slots], index, skip1, skip2, bias, scales, experts)
    source = rows.reshape(-1, hidden)
    low = -1 if mode in PADDED else 0
    known = bool(((index >= low) & (index < len(source))).all())
    require(known, operator, f"expanded_src_to_dst_row has a number outside of [{low}, {len(source)})")

    places = (index.view(slots, tokens).t() if mode in BY_COLUMNS else index.view(tokens, slots)).long()
    step = float16 if rows.dtype == float16 else float32  # what every step is rounded to
    out = torch.zeros(tokens, hidden, dtype=step)
    for skip in (skip1, skip2):
        out = out if skip is None else out + skip.to(step)
    for slot in range(slots):
        place = places[:, slot]
        term = torch.where((place >= 0).unsqueeze(1), source[place.clamp(min=0)].to(step), torch.zeros((), dtype=step))
        if bias is not None and experts is not None:
            term = term + bias[experts[:, slot].long()].to(step)
        out = out + (term if scales is None else term * scales[:, slot, None].to(step))
    return out.to(rows.dtype)


def _rows(
    x: Tensor, tokens: Tensor, experts: Tensor, scale: Tensor | None, quantised: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of x for tokens, quantised where that is asked for, and their scales."""
    if not quantised:
        return x[tokens], None if scale is None else scale[tokens]
    rows = x[tokens].float()
    if scale is not None:
        rows = rows * (scale if len(scale) == 1 else scale[experts])
    steps = rows.abs().amax(-1) / 127
    return torch.round(rows / steps.unsqueeze(-1)).nan_to_num(0.0).to(int8), steps  # zeros over zero


def _pairs(counts: Tensor, start: int, expert_num: int) -> Tensor:
    """List experts that have rows with their number; zeros up to one more than the experts in range."""
    pairs = torch.full((expert_num, 2), UNWRITTEN, dtype=int64)
    pairs[: len(counts) + 1] = 0
    used = counts.nonzero().flatten()
    pairs[: len(used)] = torch.stack([used + start, counts[used]], 1)
    return pairs


def _require_finalize(
    operator: str,
    rows: Tensor,
    shape: list[int],
    index: Tensor,
    skip1: Tensor | None,
    skip2: Tensor | None,
    bias: Tensor | None,
    scales: Tensor | None,
    experts: Tensor | None,
) -> None:
    tokens, slots = shape
    hidden = rows.shape[-1]
    require(skip2 is None or skip1 is not None, operator, "skip2 needs skip1")
    for name, skip in (("skip1", skip1), ("skip2", skip2)):
        if skip is not None:
            fits = skip.dtype == rows.dtype and list(skip.shape) == [tokens, hidden]
            require(fits, operator, f"{name} must be {rows.dtype} {[tokens, hidden]}, got {describe(skip)}")
    if scales is not None:
        require_dtypes(operator, FINALIZE_DTYPES, rows=rows, scales=scales)
        fits = list(index.shape) == [tokens * slots]
        require(fits, operator, f"expanded_src_to_dst_row must be {[tokens * slots]}, got {describe(index)}")
    if bias is not None:
        fits = bias.dtype == rows.dtype and bias.dim() == 2 and bias.shape[1] == hidden
        require(fits, operator, f"bias must be {rows.dtype} [E, {hidden}], got {describe(bias)}")
        require(experts is not None, operator, "bias needs export_for_source_row, the expert of every token and slot")
    if experts is not None:
        fits = experts.dtype == int32 and list(experts.shape) == shape
        require(fits, operator, f"export_for_source_row must be int32 {shape}, got {describe(experts)}")
