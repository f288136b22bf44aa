"""Add position biases to the scores of npu_fusion_attention.

Types and shapes: CANN's ops-transformer, attention/flash_attention_score/docs/aclnnFlashAttentionScoreV2.md, and the
checks of op_host/flash_attention_score_tiling_general.cpp; what the slopes mean: common/include/kernel/pse.h.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, float32

from softnpu.argument_checks import describe, require, require_values
from softnpu.formulas.fusion_attention_masks import BANDS_BY_SEQUENCE, DEFAULT_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL

MULTIPLY_ADD, ADD_MULTIPLY, SLOPES, SLOPES_OF_ROOTS = range(4)  # pse_type
ALIBI_ROWS = 1024  # of the last queries, in place of all


@dataclass(frozen=True)
class PositionBias:
    """Hold pse and what says how it enters the scores."""

    operator: str
    layout: str
    pse: Tensor | None
    kind: int
    sparse_mode: int
    shift: int  # where the keys start, less where the queries start

    def require_kind(self, dtype: torch.dtype, lengths: list[tuple[int, int]]) -> None:
        """Refuse what does not go with the dtype of the query and the lengths of queries and keys."""
        operator, pse = self.operator, self.pse
        require(0 <= self.kind <= 3, operator, f"pse_type must be in [0, 3], got {self.kind}")
        require(pse is not None or self.kind == ADD_MULTIPLY, operator, f"pse_type {self.kind} needs pse")
        if pse is None:
            return
        allowed = (float32,) if self.kind >= SLOPES else (dtype,)
        require(pse.dtype in allowed, operator, f"pse must be {allowed} for pse_type {self.kind}, got {describe(pse)}")
        require(self.sparse_mode not in BANDS_BY_SEQUENCE, operator, f"sparse_mode {self.sparse_mode} takes no pse")
        require(all(s_q > 0 for s_q, _ in lengths), operator, "pse takes no sequences without queries")
        equal = all(s_q == s_k for s_q, s_k in lengths)
        require(equal or self.kind < SLOPES, operator, "slopes need as many keys as queries in every sequence")

    def added(self, scores: Tensor, scale: float, i: int, lengths: list[tuple[int, int]]) -> Tensor:
        """Scale the scores [B, N, Sq, Skv] of sequence i and add the bias, before or after as pse_type says."""
        if self.pse is None:
            return scores * scale
        bias = self._bias(scores.shape, i, lengths)
        return (scores + bias) * scale if self.kind == ADD_MULTIPLY else scores * scale + bias

    def _bias(self, shape: torch.Size, i: int, lengths: list[tuple[int, int]]) -> Tensor:
        b, n, s_q, s_k = shape
        pse = self.pse.float()  # type: ignore[union-attr]  # added() returned without one
        is_packed = self.layout == "TND"
        if self.kind >= SLOPES:
            count = len(lengths) if is_packed else b
            self._require_shape([[n], [count, n]])
            slopes = pse[i : i + 1] if is_packed and pse.dim() == 2 else pse
            distance = (torch.arange(s_k) - torch.arange(s_q).unsqueeze(-1) + self.shift).abs().float()
            return -slopes.reshape(-1, n, 1, 1) * (distance.sqrt() if self.kind == SLOPES_OF_ROOTS else distance)
        if not is_packed:
            dense = [[b, n, s_q, s_k], [b, n, 1, s_k], [1, n, s_q, s_k]]
            alibi = [[b, n, ALIBI_ROWS, s_k], [1, n, ALIBI_ROWS, s_k]] if s_q > ALIBI_ROWS else []
            self._require_shape(dense + alibi)
            return pse if list(pse.shape) in dense else self._from_last_rows(pse, s_q, s_k)
        rows = [n * k for _, k in lengths]
        squares = [n * q * k for q, k in lengths]
        longest = max(k for _, k in lengths)
        batches = [[count, n, ALIBI_ROWS, longest] for count in (1, len(lengths))]
        self._require_shape([[sum(rows)], [sum(squares)], *batches])
        if pse.dim() == 4:
            return self._from_last_rows(pse[i % pse.shape[0]].unsqueeze(0), s_q, s_k)
        if pse.numel() == sum(rows):
            return pse.split(rows)[i].view(1, n, 1, s_k)
        return pse.split(squares)[i].view(1, n, s_q, s_k)

    def _from_last_rows(self, pse: Tensor, s_q: int, s_k: int) -> Tensor:
        """Take the bias of every distance from the last row; the device takes it from any row with that distance."""
        rule = f"the last {ALIBI_ROWS} rows of pse need as many keys as queries and sparse_mode 0, 2 or 3"
        modes = (DEFAULT_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL)
        require(s_q == s_k and self.sparse_mode in modes, self.operator, f"{rule}, got {s_q}, {s_k}")
        rows, columns = pse.shape[-2:]
        seen = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)[:-1, :-1]
        same = (pse[..., 1:, 1:] == pse[..., :-1, :-1]) | ~seen
        require_values(
            bool(same.all()), self.operator, f"the last {ALIBI_ROWS} rows of pse must depend on distances only"
        )
        distance = torch.arange(s_q).unsqueeze(-1) - torch.arange(s_k)
        return pse[..., -1, :][..., (columns - 1 - distance).clamp(max=columns - 1)]

    def _require_shape(self, shapes: list[list[int]]) -> None:
        given = list(self.pse.shape)  # type: ignore[union-attr]
        require(given in shapes, self.operator, f"pse must have one of the shapes {shapes}, got {given}")
