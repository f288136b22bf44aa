"""Define npu_ring_attention_update, which joins two results of an attention over different keys.

op-plugin, op_plugin/ops/opapi/RingAttentionUpdateKernelNpuOpApi.cpp and
test/test_custom_ops/test_npu_ring_attention_update.py. Rounding is inferred: float32, rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor, float32, int64

from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.formulas import formula
from softnpu.formulas.fusion_attention_statistics import STATISTICS


@formula
def npu_ring_attention_update(
    prev_attn_out: Tensor,
    prev_softmax_max: Tensor,
    prev_softmax_sum: Tensor,
    cur_attn_out: Tensor,
    cur_softmax_max: Tensor,
    cur_softmax_sum: Tensor,
    *,
    actual_seq_qlen: Tensor | None = None,
    input_layout: str = "SBH",
    input_softmax_layout: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result [S, B, H] or [T, N, D], and every row's maximum and sum, [B, N, S, 8] or [T, N, 8].

    TND is computed with the statistics in that order, input_softmax_layout "TND". What lies behind the last sequence is
    not written, here NaN.
    """
    operator = "npu_ring_attention_update"
    require_dtypes(operator, {(d, d) for d in FLOATING}, prev_attn_out=prev_attn_out, cur_attn_out=cur_attn_out)
    statistics = (prev_softmax_max, prev_softmax_sum, cur_softmax_max, cur_softmax_sum)
    same = {(t.shape, t.dtype) for t in statistics}
    fits = len(same) == 1 and statistics[0].dtype == float32 and statistics[0].shape[-1:] == (STATISTICS,)
    require(fits, operator, f"maxima and sums must be float32 of one shape, [..., {STATISTICS}]")
    fits = prev_attn_out.dim() == 3 and prev_attn_out.shape == cur_attn_out.shape
    require(fits, operator, f"both results must be of one shape, got {describe(prev_attn_out)}")
    require(input_layout in ("SBH", "TND"), operator, f"input_layout must be SBH or TND, got {input_layout!r}")
    layouts = ("", "SBH", "TND")
    rule = f"input_softmax_layout must be one of {layouts}, got {input_softmax_layout!r}"
    require(input_softmax_layout in layouts, operator, rule)
    if input_softmax_layout not in (("TND",) if input_layout == "TND" else ("", "SBH")):
        raise NotImplementedError(
            f"{operator}: the software device has no form of {input_layout} with statistics as {input_softmax_layout!r}"
        )
    expected, heads = _shape(operator, prev_attn_out, statistics[0], input_layout)
    fits = list(statistics[0].shape) == expected
    require(fits, operator, f"maxima and sums must be {expected}, got {describe(statistics[0])}")

    before, now = (t[..., 0] for t in (prev_softmax_max, cur_softmax_max))
    maximum = torch.maximum(before, now)
    parts = [torch.exp(m - maximum) * s[..., 0] for m, s in ((before, prev_softmax_sum), (now, cur_softmax_sum))]
    total = parts[0] + parts[1]
    shares = [(part / total).unsqueeze(-1) for part in parts]
    if input_layout == "SBH":
        shares = [share.permute(2, 0, 1, 3) for share in shares]
    results = [t.float().unflatten(-1, (heads, -1)) if input_layout == "SBH" else t.float() for t in
               (prev_attn_out, cur_attn_out)]  # fmt: skip
    out = (results[0] * shares[0] + results[1] * shares[1]).view(prev_attn_out.shape).to(prev_attn_out.dtype)
    found = [out, *(t.unsqueeze(-1).repeat_interleave(STATISTICS, -1) for t in (maximum, total))]
    if input_layout == "TND":
        end = _end(operator, actual_seq_qlen, len(out))
        for tensor in found:
            tensor[end:] = torch.nan
    return found[0], found[1], found[2]


def _shape(operator: str, out: Tensor, statistics: Tensor, layout: str) -> tuple[list[int], int]:
    """Return the shape that the statistics must have, and the number of heads."""
    if layout == "TND":
        return [*out.shape[:2], STATISTICS], out.shape[1]
    rule = f"maxima and sums must be [B, N, S, {STATISTICS}], got {describe(statistics)}"
    require(statistics.dim() == 4, operator, rule)
    s, b, h = out.shape
    heads = statistics.shape[1]
    require(heads > 0 and h % heads == 0, operator, f"H ({h}) must be a multiple of the {heads} heads")
    return [b, heads, s, STATISTICS], heads


def _end(operator: str, ends: Tensor | None, tokens: int) -> int:
    if ends is None or ends.dtype != int64 or ends.dim() != 1 or not len(ends):
        raise RuntimeError(f"{operator}: TND needs actual_seq_qlen, int64 cumulative lengths")
    last = int(ends.max())
    require(0 <= last <= tokens, operator, f"actual_seq_qlen must end within {tokens} tokens, got {last}")
    return last
