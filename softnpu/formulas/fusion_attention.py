"""Define npu_fusion_attention, versions 1 and 3, and the gradients; fusion_attention_math.py has the mathematics."""

from __future__ import annotations

import torch
from torch import Tensor, int64

from softnpu.formulas import formula
from softnpu.formulas.fusion_attention_masks import UNBOUNDED
from softnpu.formulas.fusion_attention_math import Attention, unwritten
from softnpu.host_call import OnHost
from softnpu.randomness import draw

# fmt: off


@formula
def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, inner_precise: int = 0,
    prefix: list[int] | None = None, actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None, dropout_mask: Tensor | None = None,
    seed: int = 0, offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    """Return the result, every row's maximum and sum, a reserved tensor, seed, offset and size of the dropout mask.

    dropout_mask, uint8, is one of _npu_dropout_gen_mask, with the seed and offset it was made of; without one, a seed
    that is not zero takes the place of the generator's. The gradient makes the mask again from both.
    """
    random = draw_dropout(keep_prob, dropout_mask, seed, offset)
    attention = Attention(
        "npu_fusion_attention", head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tockens,
        next_tockens, inner_precise, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout, sink, random,
        prefix, dropout_mask=dropout_mask,
    )
    out, maximum, total = attention.forward(query, key, value)
    return out, maximum, total, query.new_empty(0), *random, attention.weights(query, key)


@formula
def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, inner_precise: int = 0, seed: int = 0,
    offset: int = 0, numels: int = 0, prefix: list[int] | None = None, actual_seq_qlen: list[int] | None = None,
    actual_seq_kvlen: list[int] | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Compute the gradients of query, key, value and sink; that of pse the device leaves unwritten."""
    attention = Attention(
        "npu_fusion_attention_grad", head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob,
        pre_tockens, next_tockens, inner_precise, actual_seq_qlen, actual_seq_kvlen, sparse_mode, softmax_layout, sink,
        (seed, offset), prefix,
    )
    *gradients, dsink = attention.backward(query, key, value, dy, attention_in, softmax_max, softmax_sum)
    return *gradients, unwritten(pse), torch.empty(0) if dsink is None else dsink


@formula
def npu_fusion_attention_v3(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, pse: Tensor | None = None,
    padding_mask: Tensor | None = None, atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, inner_precise: int = 0,
    prefix: list[int] | None = None, actual_seq_qlen: Tensor | None = None, actual_seq_kvlen: Tensor | None = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, OnHost, OnHost]:
    """Compute version 1; the lengths come as CPU tensors, and seed and offset of the dropout mask leave as such."""
    random = draw_dropout(keep_prob)
    attention = Attention(
        "npu_fusion_attention_v3", head_num, input_layout, pse, padding_mask, atten_mask, scale, keep_prob, pre_tockens,
        next_tockens, inner_precise, _ends(actual_seq_qlen), _ends(actual_seq_kvlen), sparse_mode, softmax_layout, sink,
        random, prefix,
    )
    out, maximum, total = attention.forward(query, key, value)
    seed, offset = (OnHost(torch.tensor([number % 2**63], dtype=int64)) for number in random)
    return out, maximum, total, query.new_empty(0), seed, offset


@formula
def npu_fusion_attention_grad_v3(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None, atten_mask: Tensor | None = None,
    softmax_max: Tensor | None = None, softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = UNBOUNDED, next_tockens: int = UNBOUNDED, inner_precise: int = 0, seed: Tensor | None = None,
    offset: Tensor | None = None, prefix: list[int] | None = None, actual_seq_qlen: Tensor | None = None,
    actual_seq_kvlen: Tensor | None = None, sparse_mode: int = 0, gen_mask_parallel: bool = True,
    sync: bool = False, softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key, value and sink; that of pse the device leaves unwritten."""
    random = (0, 0) if seed is None or offset is None else (int(seed), int(offset))
    attention = Attention(
        "npu_fusion_attention_grad_v3", head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob,
        pre_tockens, next_tockens, inner_precise, _ends(actual_seq_qlen), _ends(actual_seq_kvlen), sparse_mode,
        softmax_layout, sink, random, prefix,
    )
    *gradients, dsink = attention.backward(query, key, value, dy, attention_in, softmax_max, softmax_sum)
    dpse = query.new_empty(0) if pse is None else unwritten(pse)
    return *gradients, dpse, torch.empty(()) if dsink is None else dsink


# fmt: on


def _ends(lengths: Tensor | None) -> list[int] | None:
    """Read the cumulative lengths of the sequences."""
    return None if lengths is None else lengths.tolist()


def draw_dropout(keep_prob: float, mask: Tensor | None = None, seed: int = 0, offset: int = 0) -> tuple[int, int]:
    """Return seed and offset of the dropout mask, the generator's unless given; zeros if nothing is dropped."""
    if keep_prob == 1:
        return 0, 0
    return draw(None) if mask is None and seed == 0 else (seed, offset)
