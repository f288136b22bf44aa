"""Say which positions npu_fusion_attention leaves out, for every ``sparse_mode``.

op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention_v3.md; what is refused besides: CANN's
ops-transformer, attention/flash_attention_score/op_host/flash_attention_score_tiling_general.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from softnpu.argument_checks import describe, require, require_values

UNBOUNDED = 2147483647
COMPRESSED = 2048  # the size of the mask that the causal and band modes share
PREFIX_ROWS = 1024  # what the mask of PREFIX_COMPRESSED has below that

(
    DEFAULT_MASK, ALL_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND, PREFIX, PREFIX_COMPRESSED, RIGHT_DOWN_CAUSAL_BAND,
    BAND_LEFT_UP_CAUSAL,
) = range(9)  # fmt: skip
BANDS_BY_SEQUENCE = (RIGHT_DOWN_CAUSAL_BAND, BAND_LEFT_UP_CAUSAL)
MOST_PREFIXES = 32


@dataclass(frozen=True)
class Masking:
    """Hold the arguments of an attention operator that leave positions out."""

    operator: str
    layout: str
    atten_mask: Tensor | None
    sparse_mode: int
    before: int
    behind: int
    prefix: list[int] | None

    def require_mode(self, count: int, longest: tuple[int, int]) -> None:
        """Refuse modes that the layout has not, prefixes that are not one a batch, and masks of other sequences.

        The mask of packed sequences is that of the longest queries and keys of the launch.
        """
        mode, tnd = self.sparse_mode, self.layout == "TND"
        allowed = [m for m in range(9) if (m != PREFIX if tnd else m not in BANDS_BY_SEQUENCE)]
        rule = f"sparse_mode must be in {allowed} in the layout {self.layout}, got {mode}"
        require(mode in allowed, self.operator, rule)
        if tnd and self.atten_mask is not None and mode in (DEFAULT_MASK, ALL_MASK):
            rule = "when input_layout is TND, the supported atten_mask shape is [MaxSq, MaxSkv]"
            rule += f" = {list(longest)}, got {list(self.atten_mask.shape)}"
            require(self.atten_mask.shape == longest, self.operator, rule)
        if self.atten_mask is not None and mode in (PREFIX, PREFIX_COMPRESSED):
            given = None if self.prefix is None else len(self.prefix)
            require(given == count, self.operator, f"prefix must have one number for each of {count}, got {given}")
            rule = f"prefix takes at most {MOST_PREFIXES} batches, got {count}"
            require(tnd or count <= MOST_PREFIXES, self.operator, rule)

    def hidden(self, shape: torch.Size, i: int, is_band: bool) -> Tensor | None:
        """Mark the positions that are left out of the i-th sequence, or of all in one of the other layouts.

        Without a mask sparse_mode, window and prefix have no effect. ``is_band`` says that this sequence is the one
        that modes 7 and 8 give the window to: the last or the first that is not empty.
        """
        if self.atten_mask is None:
            return None
        (b, n, s_q, s_k), mode = shape, self.sparse_mode
        if mode in (DEFAULT_MASK, ALL_MASK):
            return self._given(self.atten_mask.bool(), [b, n, s_q, s_k])
        if mode == PREFIX:
            mask = self.atten_mask.bool()
            expected = torch.stack([self._outside_prefix(s_q, s_k, j) for j in range(b)]).unsqueeze(1)
            rule = f"sparse_mode 5 takes its own prefix mask as atten_mask, [{b}, 1 or {n}, {s_q}, {s_k}]"
            fits = mask.dim() == 4 and mask.shape[0] == b and mask.shape[1] in (1, n) and mask.shape[2:] == (s_q, s_k)
            rule += f", got {describe(self.atten_mask)}"
            require(fits, self.operator, rule)
            require_values(bool((mask == expected).all()), self.operator, rule)
            return expected
        if mode == PREFIX_COMPRESSED:
            rule = f"sparse_mode 6 takes the upper triangle of {COMPRESSED} x {COMPRESSED} and below it"
            rule += f" {PREFIX_ROWS} rows of zeros left and ones right as atten_mask"
            self._require_constant(rule)
            if self.layout == "TND":
                return self._outside_prefix(s_q, s_k, i)
            return torch.stack([self._outside_prefix(s_q, s_k, j) for j in range(b)]).unsqueeze(1)
        rule = f"sparse_mode {mode} takes the upper triangle of {COMPRESSED} x {COMPRESSED} as atten_mask"
        self._require_constant(rule)
        if mode == LEFT_UP_CAUSAL or (mode == BAND_LEFT_UP_CAUSAL and not is_band):
            return outside(s_q, s_k, 0, UNBOUNDED, 0)
        if mode == RIGHT_DOWN_CAUSAL or (mode == RIGHT_DOWN_CAUSAL_BAND and not is_band):
            return outside(s_q, s_k, s_k - s_q, UNBOUNDED, 0)
        if is_band and mode in BANDS_BY_SEQUENCE:
            rule = f"sparse_mode {mode} needs pre_tockens >= {s_k}, the keys of the sequence with the window"
            require(self.before >= s_k, self.operator, f"{rule}, got {self.before}")
            rule = f"sparse_mode 7 needs next_tockens <= 0, got {self.behind}"
            require(mode == BAND_LEFT_UP_CAUSAL or self.behind <= 0, self.operator, rule)
        return outside(s_q, s_k, s_k - s_q, self.before, self.behind)

    def defines_empty_rows(self, s_q: int, s_k: int) -> bool:
        """Tell whether the operator knows by itself that a row may have nothing to attend to."""
        by_prefix = self.sparse_mode in (PREFIX, PREFIX_COMPRESSED) and s_q > s_k
        return by_prefix or self.sparse_mode == RIGHT_DOWN_CAUSAL

    @cached_property
    def _constant(self) -> Tensor:
        """Return the mask that the mode takes where it is no mask of the positions themselves."""
        return _triangle_and_rectangle() if self.sparse_mode == PREFIX_COMPRESSED else _upper_triangle()

    @cached_property
    def _is_constant(self) -> bool:
        """Tell whether it was given, once for all sequences of a call: there are millions of positions."""
        assert self.atten_mask is not None
        return _are_equal(self.atten_mask.bool(), self._constant)

    def _require_constant(self, rule: str) -> None:
        """Refuse another mask than the one that a mode takes."""
        assert self.atten_mask is not None
        require(self.atten_mask.shape == self._constant.shape, self.operator, rule)
        require_values(self._is_constant, self.operator, rule)

    def _given(self, mask: Tensor, shape: list[int]) -> Tensor:
        b, _, s_q, s_k = shape
        mask = mask[:s_q, :s_k] if self.layout == "TND" else mask
        shapes = (shape, [b, 1, s_q, s_k], [1, 1, s_q, s_k], [s_q, s_k])
        rule = f"atten_mask must have one of the shapes {shapes}, got {list(mask.shape)}"
        require(list(mask.shape) in shapes, self.operator, rule)
        if self.sparse_mode == DEFAULT_MASK and min(self.before, self.behind) < max(s_q, s_k):
            rule = "atten_mask keeps positions that pre_tockens and next_tockens leave out"
            left_out = outside(s_q, s_k, 0, self.before, self.behind)
            require_values(bool((mask | ~left_out).all()), self.operator, rule)
        return mask

    def _outside_prefix(self, s_q: int, s_k: int, i: int) -> Tensor:
        """Mark what neither the causal triangle from the lower right nor the first keys of all queries cover."""
        length = (self.prefix or [])[i]
        least = 0 if s_q > s_k else s_k - s_q
        rule = f"prefix must be in [{least}, {s_k}] for {s_q} queries and {s_k} keys, got {length}"
        require(least <= length <= s_k, self.operator, rule)
        return outside(s_q, s_k, s_k - s_q, UNBOUNDED, 0) & (torch.arange(s_k) >= length)


def outside(s_q: int, s_k: int, shift: int, before: int, behind: int) -> Tensor:
    """Mark keys outside the band that query i may see: i + shift - before to i + shift + behind."""
    distance = torch.arange(s_k) - torch.arange(s_q).unsqueeze(-1) - shift
    return (distance < -before) | (distance > behind)


def _are_equal(mask: Tensor, constant: Tensor) -> bool:
    """Compare two bool tensors of one shape, eight numbers at a time: it is asked in each call of attention."""
    if not mask.is_contiguous() or mask.storage_offset() % 8:
        mask = mask.clone(memory_format=torch.contiguous_format)
    return torch.equal(mask.view(torch.int64), constant.view(torch.int64))


@cache
def _upper_triangle() -> Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)


@cache
def _triangle_and_rectangle() -> Tensor:
    rectangle = (torch.arange(COMPRESSED) >= COMPRESSED // 2).expand(PREFIX_ROWS, COMPRESSED)
    return torch.cat([_upper_triangle(), rectangle])
