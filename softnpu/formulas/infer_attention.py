"""Define the attention operators for inference: npu_fused_infer_attention_score, 1 and 2, and the older halves of it.

infer_attention_math.py has the mathematics and the sources. They have no gradient. Quantised arguments, padding on the
left and shared prefixes are refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from softnpu.argument_checks import require
from softnpu.formulas import formula
from softnpu.formulas.fusion_attention_masks import UNBOUNDED
from softnpu.formulas.infer_attention_math import InferAttention

# fmt: off


@formula
def npu_fused_infer_attention_score(
    query: Tensor, key: Tensor, value: Tensor, *, pse_shift: Tensor | None = None, atten_mask: Tensor | None = None,
    actual_seq_lengths: list[int] | None = None, actual_seq_lengths_kv: list[int] | None = None,
    dequant_scale1: Tensor | None = None, quant_scale1: Tensor | None = None, dequant_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None, quant_offset2: Tensor | None = None, antiquant_scale: Tensor | None = None,
    antiquant_offset: Tensor | None = None, key_antiquant_scale: Tensor | None = None,
    key_antiquant_offset: Tensor | None = None, value_antiquant_scale: Tensor | None = None,
    value_antiquant_offset: Tensor | None = None, block_table: Tensor | None = None,
    query_padding_size: Tensor | None = None, kv_padding_size: Tensor | None = None,
    key_shared_prefix: Tensor | None = None, value_shared_prefix: Tensor | None = None,
    actual_shared_prefix_len: list[int] | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, key_rope_antiquant_scale: Tensor | None = None, num_heads: int = 1,
    scale: float = 1.0, pre_tokens: int = UNBOUNDED, next_tokens: int = UNBOUNDED, input_layout: str = "BSH",
    num_key_value_heads: int = 0, sparse_mode: int = 0, inner_precise: int = 0, block_size: int = 0,
    antiquant_mode: int = 0, key_antiquant_mode: int = 0, value_antiquant_mode: int = 0,
    softmax_lse_flag: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the result and, if wanted, the log of every row's sum of exponents in float32."""
    operator = "npu_fused_infer_attention_score"
    _refuse(operator, dequant_scale1=dequant_scale1, quant_scale1=quant_scale1, dequant_scale2=dequant_scale2,
            quant_scale2=quant_scale2, quant_offset2=quant_offset2, antiquant_scale=antiquant_scale,
            antiquant_offset=antiquant_offset, key_antiquant_scale=key_antiquant_scale,
            key_antiquant_offset=key_antiquant_offset, value_antiquant_scale=value_antiquant_scale,
            value_antiquant_offset=value_antiquant_offset, query_padding_size=query_padding_size,
            kv_padding_size=kv_padding_size, key_shared_prefix=key_shared_prefix,
            value_shared_prefix=value_shared_prefix, actual_shared_prefix_len=actual_shared_prefix_len,
            key_rope_antiquant_scale=key_rope_antiquant_scale)
    latent = query_rope is not None and key.shape[-1] == 512
    require(not (latent and softmax_lse_flag), operator, "latent attention takes no softmax_lse_flag")
    return InferAttention(
        operator, num_heads, num_key_value_heads or num_heads, input_layout, scale, sparse_mode, pre_tokens,
        next_tokens, inner_precise, pse_shift, atten_mask, actual_seq_lengths, actual_seq_lengths_kv, block_table,
        block_size, query_rope, key_rope,
    ).run(query, key, value, softmax_lse_flag)


@formula
def npu_fused_infer_attention_score_v2(
    query: Tensor, key: Tensor, value: Tensor, *, query_rope: Tensor | None = None, key_rope: Tensor | None = None,
    pse_shift: Tensor | None = None, atten_mask: Tensor | None = None, actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None, block_table: Tensor | None = None,
    dequant_scale_query: Tensor | None = None, dequant_scale_key: Tensor | None = None,
    dequant_offset_key: Tensor | None = None, dequant_scale_value: Tensor | None = None,
    dequant_offset_value: Tensor | None = None, dequant_scale_key_rope: Tensor | None = None,
    quant_scale_out: Tensor | None = None, quant_offset_out: Tensor | None = None,
    quant_scale_p: Tensor | None = None, learnable_sink: Tensor | None = None, num_query_heads: int = 1,
    num_key_value_heads: int = 0, softmax_scale: float = 1.0, pre_tokens: int = UNBOUNDED,
    next_tokens: int = UNBOUNDED, input_layout: str = "BSH", sparse_mode: int = 0, block_size: int = 0,
    query_quant_mode: int = 0, key_quant_mode: int = 0, value_quant_mode: int = 0, inner_precise: int = 0,
    return_softmax_lse: bool = False, query_dtype: int | None = None, key_dtype: int | None = None,
    value_dtype: int | None = None, query_rope_dtype: int | None = None, key_rope_dtype: int | None = None,
    key_shared_prefix_dtype: int | None = None, value_shared_prefix_dtype: int | None = None,
    dequant_scale_query_dtype: int | None = None, dequant_scale_key_dtype: int | None = None,
    dequant_scale_value_dtype: int | None = None, dequant_scale_key_rope_dtype: int | None = None,
    out_dtype: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute version 1, with ``learnable_sink`` as one more score of every row."""
    operator = "npu_fused_infer_attention_score_v2"
    _refuse(operator, dequant_scale_query=dequant_scale_query, dequant_scale_key=dequant_scale_key,
            dequant_offset_key=dequant_offset_key, dequant_scale_value=dequant_scale_value,
            dequant_offset_value=dequant_offset_value, dequant_scale_key_rope=dequant_scale_key_rope,
            quant_scale_out=quant_scale_out, quant_offset_out=quant_offset_out, quant_scale_p=quant_scale_p,
            query_dtype=query_dtype, key_dtype=key_dtype, value_dtype=value_dtype, query_rope_dtype=query_rope_dtype,
            key_rope_dtype=key_rope_dtype, out_dtype=out_dtype)
    latent = query_rope is not None and key.shape[-1] == 512
    require(not (latent and return_softmax_lse), operator, "latent attention takes no return_softmax_lse")
    return InferAttention(
        operator, num_query_heads, num_key_value_heads or num_query_heads, input_layout, softmax_scale, sparse_mode,
        pre_tokens, next_tokens, inner_precise, pse_shift, atten_mask, actual_seq_qlen, actual_seq_kvlen, block_table,
        block_size, query_rope, key_rope, learnable_sink,
    ).run(query, key, value, return_softmax_lse)


@formula
def npu_prompt_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None, pse_shift: Tensor | None = None, actual_seq_lengths: list[int] | None = None,
    deq_scale1: Tensor | None = None, quant_scale1: Tensor | None = None, deq_scale2: Tensor | None = None,
    quant_scale2: Tensor | None = None, quant_offset2: Tensor | None = None, num_heads: int = 1,
    scale_value: float = 1.0, pre_tokens: int = UNBOUNDED, next_tokens: int = 0, input_layout: str = "BSH",
    num_key_value_heads: int = 0, actual_seq_lengths_kv: list[int] | None = None, sparse_mode: int = 0,
) -> Tensor:
    """Compute the attention of several queries. With a mask ``next_tokens`` is 0 unless said otherwise."""
    operator = "npu_prompt_flash_attention"
    _refuse(operator, padding_mask=padding_mask, deq_scale1=deq_scale1, quant_scale1=quant_scale1,
            deq_scale2=deq_scale2, quant_scale2=quant_scale2, quant_offset2=quant_offset2)
    layouts = ("BSH", "BSND", "BNSD", "BNSD_BSND", "TND")
    require(input_layout in layouts, operator, f"input_layout must be one of {layouts}, got {input_layout!r}")
    return InferAttention(
        operator, num_heads, num_key_value_heads or num_heads, input_layout, scale_value, sparse_mode, pre_tokens,
        next_tokens, 0, pse_shift, atten_mask, actual_seq_lengths, actual_seq_lengths_kv,
    ).run(query, key, value)[0]


@formula
def npu_incre_flash_attention(
    query: Tensor, key: Tensor, value: Tensor, *, padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None, pse_shift: Tensor | None = None, actual_seq_lengths: list[int] | None = None,
    antiquant_scale: Tensor | None = None, antiquant_offset: Tensor | None = None,
    block_table: Tensor | None = None, dequant_scale1: Tensor | None = None, quant_scale1: Tensor | None = None,
    dequant_scale2: Tensor | None = None, quant_scale2: Tensor | None = None, quant_offset2: Tensor | None = None,
    kv_padding_size: Tensor | None = None, num_heads: int = 1, scale_value: float = 1.0, input_layout: str = "BSH",
    num_key_value_heads: int = 0, block_size: int = 0, inner_precise: int = 1,
) -> Tensor:
    """Compute the attention of one query; ``actual_seq_lengths`` are those of the keys."""
    operator = "npu_incre_flash_attention"
    _refuse(operator, padding_mask=padding_mask, antiquant_scale=antiquant_scale, antiquant_offset=antiquant_offset,
            dequant_scale1=dequant_scale1, quant_scale1=quant_scale1, dequant_scale2=dequant_scale2,
            quant_scale2=quant_scale2, quant_offset2=quant_offset2, kv_padding_size=kv_padding_size)
    layouts = ("BSH", "BSND", "BNSD")
    require(input_layout in layouts, operator, f"input_layout must be one of {layouts}, got {input_layout!r}")
    one = query.dim() == len(input_layout) and query.shape[2 if input_layout == "BNSD" else 1] == 1
    require(one, operator, f"query must have one token, got {list(query.shape)} as {input_layout}")
    return InferAttention(
        operator, num_heads, num_key_value_heads or num_heads, input_layout, scale_value, inner_precise=inner_precise,
        pse=pse_shift, mask=atten_mask, key_lengths=actual_seq_lengths, block_table=block_table, block_size=block_size,
    ).run(query, key, value)[0]


# fmt: on


def _refuse(operator: str, **arguments: Any) -> None:
    """Refuse arguments that the formula does not cover."""
    given = [name for name, value in arguments.items() if value is not None]
    if given:
        raise NotImplementedError(
            f"{operator}: the software device has no form of the operator with {', '.join(given)}"
        )
