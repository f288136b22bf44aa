"""Define MoE routing: the experts of every token and their weights.

Shapes, dtypes and limits: op-plugin, op_plugin/ops/opapi/MoeGatingTopK*.cpp, and CANN's ops-transformer,
moe/moe_gating_top_k{,_softmax,_softmax_v2} and moe/moe_compute_expert_tokens, README and op_host; rounding: op_kernel
there. Scores are computed in float32; of equal scores the one with the lower index comes first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, float16, float32, int32

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes, require_values
from softnpu.cann import require_before
from softnpu.formulas import formula

MAX_K = 1024
MAX_EXPERTS = 2048
MAX_SORTED = 2**24
SOFTMAX, SIGMOID = 0, 1  # norm_type
MAX, TOP_2 = 0, 1  # group_select_mode
GROUP_ALIGNMENT = 32


@formula
def npu_moe_gating_top_k_softmax(x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, ...]:
    """Return the k largest of ``softmax(x)`` over the last of 2 or 3 dimensions, in the dtype of x and not normalised
    again; their indices, int32; and row_idx, int32, which counts down the columns: ``row_idx[i, j] = j · rows + i``.

    A row that is finished has the number of experts for its indices. float16 is rounded before it is compared.
    """
    operator = "npu_moe_gating_top_k_softmax"
    _require_top_k(operator, x, finished, k)
    scores = torch.softmax(x.float(), -1)
    y, expert_idx = _top_k(scores.half() if x.dtype == float16 else scores, k)
    rows = x.shape[:-1].numel()
    row_idx = torch.arange(rows * k, dtype=int32).view(k, rows).t().reshape(y.shape)
    return y.to(x.dtype), _unless_finished(expert_idx, finished, x.shape[-1]), row_idx


@formula
def npu_moe_gating_top_k_softmax_v2(
    x: Tensor,
    *,
    k: int = 1,
    finished: Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the k largest of softmax(x) or, with renorm 1, the softmax of the k largest of x; their indices, int32;
    and the softmax in float32, empty unless output_softmax asks for it and renorm is 0. Otherwise as the first version.

    The device computes nothing if k is 0 or x is empty: then the softmax stays unwritten, here NaN.
    """
    operator = "npu_moe_gating_top_k_softmax_v2"
    _require_top_k(operator, x, finished, k)
    require(renorm in (None, 0, 1), operator, f"renorm is {renorm}; the device takes 0 or 1")
    if renorm:
        largest, expert_idx = _top_k(x.float(), k)
        y = torch.softmax(largest, -1)
    else:
        y, expert_idx = _top_k(torch.softmax(x.float(), -1), k)
    scores = torch.empty(0, dtype=float32)
    if output_softmax and not renorm:
        scores = torch.softmax(x.float(), -1) if k else torch.full(x.shape, math.nan)
    return y.to(x.dtype), _unless_finished(expert_idx, finished, x.shape[-1]), scores


@formula
def npu_moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = MAX,
    renorm: int = 0,
    norm_type: int = SOFTMAX,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose experts by ``s = softmax(x)`` or, norm_type 1, ``sigmoid(x)`` of x [T, E]: the k largest of ``s + bias``
    among the k_group best of group_count groups, which are compared by their largest element or, group_select_mode 1,
    by the sum of their two largest. Weights are s at these, without the bias; for sigmoid divided by their sum plus
    eps; times routed_scaling_factor.

    Returns the weights in the dtype of x, the indices, int32, and s, float32, which stays unwritten, here NaN, without
    out_flag. torch_npu's gradient reads it: pass out_flag=True where a gradient is needed.
    """
    operator = "npu_moe_gating_top_k"
    given = input_ids is not None or tid2eid is not None
    require(not given, operator, "the software device has no form of the operator with input_ids and tid2eid")
    _require_groups(operator, x, k, bias, k_group, group_count, group_select_mode)
    require(renorm == 0, operator, f"renorm is {renorm}; the device takes 0 only")
    rule = f"norm_type is {norm_type}; the device takes {SOFTMAX}, softmax, or {SIGMOID}, sigmoid"
    require(norm_type in (SOFTMAX, SIGMOID), operator, rule)
    # op-plugin 7.1.0, docs/context/torch_npu-npu_moe_gating_top_k.md
    shape = x.shape[1] == 256 and k <= 32 and bias is not None and (group_count, k_group) == (8, 4)
    mode = group_select_mode == TOP_2 or norm_type == SOFTMAX
    rule = "takes 256 experts, k up to 32, a bias, k_group 4 and group_count 8, no group_select_mode 0 with norm_type 1"
    require_before((8, 3), shape and mode and not out_flag, operator, f"{rule}, and no out_flag")
    s = torch.softmax(x.float(), -1) if norm_type == SOFTMAX else torch.sigmoid(x.float())
    chosen = s if bias is None else s + bias.float()
    if group_count > 1:
        groups = chosen.unflatten(-1, (group_count, -1))
        score = groups.amax(-1) if group_select_mode == MAX else groups.topk(2).values.sum(-1)
        kept = torch.zeros_like(score, dtype=torch.bool).scatter_(1, _top_k(score, k_group)[1].long(), True)
        chosen = groups.masked_fill(~kept.unsqueeze(-1), -math.inf).flatten(1)
    expert_idx = _top_k(chosen, k)[1]
    y = s.gather(1, expert_idx.long())
    if norm_type == SIGMOID:
        y = y / (y.sum(-1, keepdim=True) + eps)
    y = y * routed_scaling_factor
    return y.to(x.dtype), expert_idx, s if out_flag else torch.full_like(s, math.nan)


@formula
def npu_moe_gating_top_k_backward(
    x_norm: Tensor,
    grad_y: Tensor,
    expertIdx: Tensor,  # noqa: N803  the schema's name
    *,
    renorm: int = 0,
    norm_type: int = SOFTMAX,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Tensor:
    """Compute the gradient of x [T, E], through the weights, in float32, rounded once to the dtype of grad_y [T, K].

    x_norm is the third result of npu_moe_gating_top_k. The device has the gradient of the sigmoid only.
    """
    operator = "npu_moe_gating_top_k_backward"
    require_dtypes(operator, {(float32, d, int32) for d in FLOATING}, x_norm=x_norm, grad_y=grad_y, expertIdx=expertIdx)
    given = f"x_norm {describe(x_norm)}, grad_y {describe(grad_y)} and expertIdx {describe(expertIdx)}"
    fits = x_norm.dim() == 2 and grad_y.dim() == 2 and grad_y.shape == expertIdx.shape
    require(fits and len(x_norm) == len(grad_y), operator, f"{given} must be [T, E], [T, K] and [T, K]")
    require(renorm == 0, operator, f"renorm is {renorm}; the device takes 0 only")
    require(norm_type == SIGMOID, operator, f"norm_type is {norm_type}; the device takes {SIGMOID}, sigmoid, only")
    index, g = expertIdx.long(), grad_y.float()
    s = x_norm.gather(1, index)
    total = s.sum(-1, keepdim=True) + eps
    slope = (g - (g * s).sum(-1, keepdim=True) / total) / total * routed_scaling_factor
    return torch.zeros_like(x_norm).scatter_(1, index, slope * s * (1 - s)).to(grad_y.dtype)


@formula
def npu_moe_compute_expert_tokens(sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
    """Find where the rows of every expert end among sorted indices of experts: int32 [num_expert]."""
    operator, experts = "npu_moe_compute_expert_tokens", sorted_expert_for_source_row
    require_dtypes(operator, {(int32,)}, sorted_expert_for_source_row=experts)
    require(experts.dim() == 1, operator, f"the indices must have 1 dimension, got {describe(experts)}")
    require(experts.numel() < MAX_SORTED, operator, f"{experts.numel()} indices; the device takes fewer than 2**24")
    rule = f"num_expert is {num_expert}; the device takes 1 to {MAX_EXPERTS}"
    require(1 <= num_expert <= MAX_EXPERTS, operator, rule)
    require_values(
        bool((experts.diff() >= 0).all()), operator, "the indices must be sorted: the device searches by halves"
    )
    return torch.searchsorted(experts, torch.arange(num_expert, dtype=int32), right=True, out_int32=True)


def _top_k(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest, of equal ones the first, and their indices, int32."""
    values, indices = torch.sort(scores, stable=True, descending=True)
    return values[..., :k].contiguous(), indices[..., :k].to(int32)


def _unless_finished(expert_idx: Tensor, finished: Tensor | None, experts: int) -> Tensor:
    return expert_idx if finished is None else expert_idx.masked_fill(finished.unsqueeze(-1), experts)


def _require_top_k(operator: str, x: Tensor, finished: Tensor | None, k: int) -> None:
    require_dtypes(operator, {(d,) for d in FLOATING}, x=x)
    require(x.dim() in (2, 3), operator, f"x must have 2 or 3 dimensions, got {describe(x)}")
    limit = min(x.shape[-1], MAX_K)
    require(0 <= k <= limit, operator, f"k is {k}; the device takes 0 to {limit} for x {describe(x)}")
    if finished is not None:
        fits = finished.dtype == torch.bool and finished.shape == x.shape[:-1]
        rule = f"finished must be bool {list(x.shape[:-1])}, got {describe(finished)}"
        require(fits, operator, rule)


def _require_groups(
    operator: str, x: Tensor, k: int, bias: Tensor | None, k_group: int, group_count: int, group_select_mode: int
) -> None:
    require_dtypes(operator, {(d,) for d in FLOATING}, x=x)
    require(x.dim() == 2, operator, f"x must have 2 dimensions, got {describe(x)}")
    experts = x.shape[1]
    require(experts <= MAX_EXPERTS, operator, f"{experts} experts; the device takes at most {MAX_EXPERTS}")
    if bias is not None:
        fits = bias.dtype == x.dtype and list(bias.shape) == [experts]
        require(fits, operator, f"the bias must be {x.dtype} {[experts]}, got {describe(bias)}")
    even = group_count > 0 and experts % group_count == 0
    require(even, operator, f"group_count is {group_count}, which does not divide {experts} experts")
    size = experts // group_count
    require(1 <= k_group <= group_count, operator, f"k_group is {k_group} of {group_count} groups")
    require(1 <= k <= k_group * size, operator, f"k is {k}; there are {k_group} groups of {size} experts")
    require(group_select_mode in (MAX, TOP_2), operator, f"group_select_mode is {group_select_mode}; take 0 or 1")
    # perGroupExpertCount_ < 2 in CANN's moe_gating_top_k_tiling.cpp: two are enough
    rule = f"groups of {size} expert cannot be compared by their two largest"
    require(group_select_mode == MAX or size >= 2, operator, rule)
    aligned = math.ceil(size / GROUP_ALIGNMENT) * GROUP_ALIGNMENT * group_count
    rule = f"{group_count} groups of {size} experts fill {aligned} places; the device has {MAX_EXPERTS}"
    alone = group_count in (1, experts) or k_group == group_count
    require(alone or aligned <= MAX_EXPERTS, operator, rule)
