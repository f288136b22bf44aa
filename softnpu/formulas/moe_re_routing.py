"""Order by expert the rows that came from other cards.

op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_moe_re_routing.md and op_plugin/ops/opapi/MoeReRoutingOpApi.cpp.
"""

from __future__ import annotations

import torch
from torch import Tensor, bfloat16, float16, float32, int8, int32, int64

from softnpu.argument_checks import describe, require, require_dtypes
from softnpu.formulas import formula


@formula
def npu_moe_re_routing(
    tokens: Tensor,
    expert_token_num_per_rank: Tensor,
    *,
    per_token_scales: Tensor | None = None,
    expert_token_num_type: int = 1,
    idx_type: int = 0,
    tokens_dtype: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the rows ``[A, H]`` by expert, their scales, the row that each was, and the rows of every expert.

    ``expert_token_num_per_rank`` is [cards, experts]: the rows come by card, and in each by expert. Without scales,
    those that are returned are not written, here NaN.
    """
    operator = "npu_moe_re_routing"
    if tokens_dtype is not None:
        raise NotImplementedError(f"{operator}: the software device has no dtype number {tokens_dtype}")
    require(tokens.dim() > 1, operator, "tokens dim should larger than 1")
    counts = expert_token_num_per_rank
    require(counts.dim() > 1, operator, "expert_token_num_per_rank dim should larger than 1")
    require_dtypes(operator, {(float16,), (bfloat16,), (int8,)}, tokens=tokens)
    require_dtypes(operator, {(int32,), (int64,)}, expert_token_num_per_rank=counts)
    require(tokens.dim() == 2 and counts.dim() == 2, operator, f"tokens must be [A, H], got {describe(tokens)}")
    require(0 < tokens.shape[1] < 16384, operator, f"a token must have 1 to 16383 numbers, got {describe(tokens)}")
    require(expert_token_num_type == 1, operator, f"expert_token_num_type must be 1, got {expert_token_num_type}")
    require(idx_type == 0, operator, f"idx_type must be 0, got {idx_type}")
    rows, total = tokens.shape[0], int(counts.sum())
    require(total == rows, operator, f"expert_token_num_per_rank counts {total} tokens, there are {rows}")
    cards, experts = counts.shape
    owner = torch.arange(experts).repeat(cards).repeat_interleave(counts.flatten().long())
    order = torch.argsort(owner, stable=True)
    scales = torch.full((rows,), torch.nan)
    if per_token_scales is not None:
        require_dtypes(operator, {(float32,)}, per_token_scales=per_token_scales)
        fits = per_token_scales.shape == (rows,)
        require(fits, operator, f"per_token_scales must be [{rows}], got {describe(per_token_scales)}")
        scales = per_token_scales[order]
    return tokens[order], scales, order.int(), counts.sum(0).to(counts.dtype)
