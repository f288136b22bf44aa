"""Arrange the maximum and the sum of each row of npu_fusion_attention's softmax as it writes them: eight times.

They are [B, N, S, 8], in the layout TND [T, N, 8]. Without ``softmax_layout`` a packed sequence has its values there
head by head: CANN's ops-transformer, attention/flash_attention_score/op_kernel, flash_attention_score_s1s2_bn2gs1.h,
``softmaxMaxOffset``.
"""

from __future__ import annotations

import torch
from torch import Tensor, float32

from softnpu.argument_checks import describe, require
from softnpu.formulas.fusion_attention_layouts import join

STATISTICS = 8


def arrange(columns: list[Tensor], layout: str, softmax_layout: str, length: int) -> Tensor:
    """Write the columns of the sequences, ``[B, N, S, 1]`` each; nothing is written behind the last of the rows."""
    if layout == "TND" and softmax_layout != "TND":
        heads, values = columns[0].shape[1], torch.cat([column.flatten() for column in columns])
        written = values.new_full((length * heads,), torch.nan)
        written[: len(values)] = values
        return written.view(length, heads, 1).repeat(1, 1, STATISTICS)
    column = join(columns, length)
    column = column[0].transpose(0, 1) if layout == "TND" else column
    return column.repeat(*[1] * (column.dim() - 1), STATISTICS)


def columns(
    operator: str, statistics: Tensor, layout: str, softmax_layout: str, q: Tensor, lengths: list[int]
) -> Tensor:
    """Undo ``arrange`` for a query ``[B, N, S, D]``, as one column of all sequences."""
    batch, heads, length = q.shape[:3]
    shape = (length, heads, STATISTICS) if layout == "TND" else (batch, heads, length, STATISTICS)
    rule = f"softmax_max and softmax_sum must be float32 {list(shape)}, got {describe(statistics)}"
    require(statistics.shape == shape and statistics.dtype == float32, operator, rule)
    if layout != "TND":
        return statistics[..., :1]
    if softmax_layout == "TND":
        return statistics[..., :1].transpose(0, 1).unsqueeze(0)
    parts = statistics[..., 0].flatten()[: heads * sum(lengths)].split([heads * rows for rows in lengths])
    return join([part.view(1, heads, rows, 1) for part, rows in zip(parts, lengths)], length)
