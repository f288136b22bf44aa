"""Define npu_fusion_attention_v2 and its gradient: version 1 with rotary parts and with ``pse_type``.

op-plugin, op_plugin/ops/opapi/FlashAttentionV2KernelNpuOpApi.cpp; CANN's ops-transformer,
attention/flash_attention_score/docs/aclnnFlashAttentionScoreV2.md and aclnnFlashAttentionVarLenScoreV3.md, where
``score = scale · (q · kᵀ + query_rope · key_ropeᵀ)``.
"""

from __future__ import annotations

import torch
from torch import Tensor, cat

from softnpu.argument_checks import describe, require
from softnpu.formulas import formula
from softnpu.formulas.fusion_attention import draw_dropout
from softnpu.formulas.fusion_attention_masks import UNBOUNDED
from softnpu.formulas.fusion_attention_math import Attention, unwritten
from softnpu.formulas.fusion_attention_pse import ADD_MULTIPLY

# fmt: off


@formula
def npu_fusion_attention_v2(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED, inner_precise: int = 0, prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None, actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = ADD_MULTIPLY,
    q_start_idx: list[int] | None = None, kv_start_idx: list[int] | None = None, softmax_layout: str = "",
    sink: Tensor | None = None, dropout_mask: Tensor | None = None, seed: int = 0, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Return the result, every row's maximum and sum, a reserved tensor, seed, offset and size of the dropout mask."""
    operator = "npu_fusion_attention_v2"
    random = draw_dropout(keep_prob, dropout_mask, seed, offset)
    attention = Attention(
        operator, head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tokens, next_tokens,
        inner_precise, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout, sink, random, prefix, pse_type,
        _shift(operator, q_start_idx, kv_start_idx), dropout_mask,
    )
    q, k = _joined(operator, input_layout, query, key, value, query_rope, key_rope)
    out, maximum, total = attention.forward(q, k, value)
    return out, maximum, total, query.new_empty(0), *random, attention.weights(query, key)


@formula
def npu_fusion_attention_grad_v2(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    scale_value: float = 1.0, keep_prob: float = 1.0, pre_tokens: int = UNBOUNDED, next_tokens: int = UNBOUNDED,
    inner_precise: int = 0, seed: int = 0, offset: int = 0, numels: int = 0, prefix: list[int] | None = None,
    actual_seq_qlen: list[int] | None = None, actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, pse_type: int = ADD_MULTIPLY,
    q_start_idx: list[int] | None = None, kv_start_idx: list[int] | None = None, softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor]:
    """Compute the gradients of query, key, value, pse (unwritten), query_rope, key_rope and sink."""
    operator = "npu_fusion_attention_grad_v2"
    attention = Attention(
        operator, head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob, pre_tokens,
        next_tokens, inner_precise, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout, sink,
        (seed, offset), prefix, pse_type, _shift(operator, q_start_idx, kv_start_idx),
    )
    q, k = _joined(operator, input_layout, query, key, value, query_rope, key_rope)
    dq, dk, dv, dsink = attention.backward(q, k, value, dy, attention_in, softmax_max, softmax_sum)
    dq_rope = dk_rope = None
    if query_rope is not None:
        sizes = [query.shape[-1], query_rope.shape[-1]]
        (dq, dq_rope), (dk, dk_rope) = ([part.contiguous() for part in d.split(sizes, -1)] for d in (dq, dk))
    return dq, dk, dv, unwritten(pse), dq_rope, dk_rope, torch.empty(0) if dsink is None else dsink


# fmt: on


def _joined(
    operator: str, layout: str, query: Tensor, key: Tensor, value: Tensor, q_rope: Tensor | None, k_rope: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Put the rotary parts behind query and key: the sum of both products is that of the longer vectors."""
    if q_rope is None and k_rope is None:
        return query, key
    if q_rope is None or k_rope is None:
        raise RuntimeError(f"{operator}: query_rope and key_rope are given together or not at all")
    require(layout == "TND", operator, f"query_rope and key_rope take the layout TND, got {layout}")
    require(query.shape[-1] >= value.shape[-1], operator, "the head size of value must not pass that of query")
    for name, x, rope in (("query_rope", query, q_rope), ("key_rope", key, k_rope)):
        given = f"{describe(rope)} for {describe(x)}"
        fits = rope.dtype == x.dtype and rope.shape[:-1] == x.shape[:-1]
        require(fits, operator, f"{name} must have the dtype, tokens and heads of what it extends, got {given}")
        size = rope.shape[-1]
        rule = f"the head size of {name} must be a multiple of 8 and at most that of value, got {given}"
        require(size % 8 == 0 and 0 < size <= value.shape[-1], operator, rule)
    return cat([query, q_rope], -1), cat([key, k_rope], -1)


def _shift(operator: str, q_start: list[int] | None, kv_start: list[int] | None) -> int:
    """Return where the keys start, less where the queries start; each is a list of one number."""
    for name, start in (("q_start_idx", q_start), ("kv_start_idx", kv_start)):
        require(start is None or len(start) <= 1, operator, f"{name} must hold one number, got {start}")
    return (kv_start or [0])[0] - (q_start or [0])[0]
