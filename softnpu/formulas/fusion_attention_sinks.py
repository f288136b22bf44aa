"""Say what npu_fusion_attention does with sinks in a release of CANN: what it refuses, and what it leaves unwritten.

op-plugin, op_plugin/ops/opapi/FlashAttentionKernelNpuOpApi.cpp: before CANN 8.5 there are none. The rest is in CANN's
ops-transformer, attention/flash_attention_score_grad, of 8.5.0, 9.0.0 and 9.1.0.
"""

from __future__ import annotations

import torch
from torch import Tensor, float32

from softnpu.argument_checks import describe, require
from softnpu.cann import CANN, require_before
from softnpu.formulas.fusion_attention_masks import ALL_MASK, COMPRESSED, DEFAULT_MASK, RIGHT_DOWN_CAUSAL

_LARGEST_HEAD = 128
_BLOCK = 256
_BLOCKS_COPIED = 4096  # of 32 bytes each, two thirds of the 192 KiB of local memory
_LARGEST_PRODUCT = 2**31


def require_sink(operator: str, sink: Tensor, heads: int) -> None:
    """Refuse sinks before CANN 8.5, and such as are not a float32 value for each head."""
    require_before((8, 5), False, operator, "The param sink is not supported in this CANN version")
    require(sink.dtype == float32, operator, f"sink must be {(float32,)}, got {describe(sink)}")
    require(sink.shape == (heads,), operator, f"sink must have the shape [{heads}], got {describe(sink)}")


def require_gradient(operator: str, query: Tensor) -> None:
    """Refuse the gradient with a sink in float32: op_api, aclnn_flash_attention_score_grad.cpp."""
    rule = "query input and output of FAG with sinkInOptional do not support tensor with datatype Float32"
    require(query.dtype != float32, operator, rule)


def has_template_without_sink(
    layout: str, size: int, longest: tuple[int, int], mask: Tensor | None, sparse_mode: int, plain: bool
) -> bool:
    """Tell whether the gradient is that of the deterministic template which never writes that of a sink.

    op_host, flash_attention_score_grad_tiling_s1s2_bn2gs1s2_basic_det.cpp, ``IsCapable``, registered before the
    template that has sinks. It sees heads filled up to a multiple of 16, and values to the size of keys: op_api,
    aclnn_flash_attention_score_grad.cpp, ``GetInputShapeInfo``, where BSH that is filled up becomes BSND. Packed
    sequences it leaves to others beside tensors q_start_idx and kv_start_idx. op-plugin hands over empty ones with a
    sink, which CANN's opbase makes tensors; no card was asked, so that what may be unwritten is unwritten here.

    Args:
        layout: the ``input_layout``.
        size: of the heads of query and key.
        longest: how many queries and keys there are, of packed sequences in the longest.
        mask: the ``atten_mask``.
        sparse_mode: the mode.
        plain: whether there is neither dropout nor pse.
    """
    if not torch.are_deterministic_algorithms_enabled() or not plain or size > _LARGEST_HEAD:
        return False
    if layout != "TND":
        others = "BNSD", "SBH", *(("BSH",) if size % 16 == 0 else ())
        if CANN < (9, 0) or layout not in others or longest[0] != longest[1]:
            return False
    if mask is None:
        return sparse_mode == DEFAULT_MASK
    if sparse_mode == ALL_MASK:
        return tuple(mask.shape[:2]) == longest
    return sparse_mode == RIGHT_DOWN_CAUSAL and mask.shape[-1] == COMPRESSED


def loses_a_piece(count: int, longest: tuple[int, int]) -> bool:
    """Tell whether sums of the gradient of a sink get lost on the way through local memory.

    Before CANN 9.1 they are summed in pieces, the last of which has the size of the rest, and no size where there is no
    rest; and counted in 32 bits: op_kernel, flash_attention_score_grad_post.h, ``tailDsinkSumSize``, and
    flash_attention_score_grad_s1s2_bn2gs1s2_sab.h, ``dataSizePerS1S2``. Local memory of a 910B is 192 KiB in the tests
    of CANN's tilings; with a piece of another layout, which heads of 128 in bfloat16 have, other sizes are lost.

    Args:
        count: how many sequences there are.
        longest: how many queries and keys the longest have.
    """
    queries, keys = (-(-length // _BLOCK) for length in longest)
    overflows = queries * keys * _BLOCK**2 >= _LARGEST_PRODUCT
    return CANN < (9, 1) and (count * queries * keys % _BLOCKS_COPIED == 0 or overflows)
