"""Compute the inference attention, ``softmax(mask(scale · q · kᵀ + pse)) · v``, of floating point tensors.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu, the pages of npu_fused_infer_attention_score,
its version 2, npu_prompt_flash_attention and npu_incre_flash_attention. pse is added behind the scaling: CANN's
ops-transformer, attention/prompt_flash_attention/op_kernel/prompt_flash_attention_s1s2_bns1_x910.h. Rounding is
inferred: products add up in float32, weights are rounded to the dtype of q, the result is rounded once.

Where lengths leave queries or keys out, the result is filled with zeros first (needInit of
op_host/prompt_flash_attention_tiling.cpp): their rows are zero, and their sum of exponents is infinite.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, bfloat16, float16

from softnpu import memory_poisoning
from softnpu.argument_checks import describe, require, require_dtypes, require_values
from softnpu.cann import require_before
from softnpu.formulas import infer_attention_layouts as layouts
from softnpu.formulas.fusion_attention_masks import (
    ALL_MASK,
    BAND,
    COMPRESSED,
    DEFAULT_MASK,
    LEFT_UP_CAUSAL,
    RIGHT_DOWN_CAUSAL,
    UNBOUNDED,
    outside,
)

# With a mask [1, 1, 1, S] and one query, keys behind these are attended to whatever the mask says
MASKED_KEYS_OF_ONE_QUERY = 512
LATENT = 512  # the head size of the absorbed form of multi-head latent attention
LATENT_LAYOUTS = ("BSH", "BSND", "BNSD", "TND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD", "TND_NTD")
ROTARY = 64


@dataclass(frozen=True)
class InferAttention:
    """Hold the arguments of one call, as all of these operators have them."""

    operator: str
    heads: int
    kv_heads: int
    layout: str
    scale: float
    sparse_mode: int = DEFAULT_MASK
    before: int = UNBOUNDED
    behind: int = UNBOUNDED
    inner_precise: int = 0
    pse: Tensor | None = None
    mask: Tensor | None = None
    query_lengths: list[int] | None = None
    key_lengths: list[int] | None = None
    block_table: Tensor | None = None
    block_size: int = 0
    query_rope: Tensor | None = None
    key_rope: Tensor | None = None
    sink: Tensor | None = None

    def run(self, query: Tensor, key: Tensor, value: Tensor, wants_lse: bool = False) -> tuple[Tensor, Tensor]:
        """Return the result, and the log of every row's sum of exponents: [B, N, S, 1] or [T, N, 1], or nothing."""
        self._require_arguments(query, key, value, wants_lse)
        q, k, v = self._enter(query, key, value)
        self._require_sizes(q, k, v)
        parts = [self._sequence(i, *tensors) for i, tensors in enumerate(zip(q, k, v))]
        outs, sums = (list(column) for column in zip(*parts))
        tokens = query.shape[1 if self.layout.startswith("NTD") else 0]
        out = layouts.from_nsd(self.layout, outs, tokens)
        if not wants_lse:
            return out, torch.empty(0)
        return out, layouts.from_nsd("TND" if layouts.is_packed(self.layout) else "BNSD", sums, tokens)

    # ---- what is accepted -----------------------------------------------------------------------------------------
    def _require_arguments(self, query: Tensor, key: Tensor, value: Tensor, wants_lse: bool) -> None:
        operator = self.operator
        require_dtypes(operator, {(d, d, d) for d in (float16, bfloat16)}, query=query, key=key, value=value)
        require(self.layout in layouts.LAYOUTS, operator, f"input_layout must be one of {layouts.LAYOUTS}")
        fits = 0 < self.heads <= 256 and 0 < self.kv_heads <= 256 and self.heads % self.kv_heads == 0
        require(
            fits, operator, f"heads must be at most 256 and a multiple of those of key: {self.heads}, {self.kv_heads}"
        )
        require(self.sparse_mode in range(5), operator, f"sparse_mode must be in [0, 4], got {self.sparse_mode}")
        require(self.inner_precise in range(4), operator, f"inner_precise must be in [0, 3], got {self.inner_precise}")
        given = (self.query_rope is None, self.key_rope is None)
        require(given[0] == given[1], operator, "query_rope and key_rope are given together or not at all")
        if self.query_rope is not None and self.key_rope is not None:
            require(self.pse is None, operator, "query_rope takes no pse")
            ropes = {"query_rope": self.query_rope, "key_rope": self.key_rope}
            require_dtypes(operator, {(d, d, d) for d in (float16, bfloat16)}, query=query, **ropes)
        elif self.heads // self.kv_heads > 64:
            require(False, operator, f"at most 64 heads share one of key, got {self.heads // self.kv_heads}")
        if self.sink is not None:
            rule = f"learnable_sink must be bfloat16 [{self.heads}], got {describe(self.sink)}"
            require(self.sink.dtype == bfloat16 and self.sink.shape == (self.heads,), operator, rule)
            rule = "learnable_sink takes the layouts TND and NTD_TND, and no pse"
            require(self.layout in ("TND", "NTD_TND") and self.pse is None, operator, rule)
        if self.block_table is not None:
            require(self.key_lengths is not None, operator, "blocks of keys need their actual lengths")

    def _enter(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return query, key and value of every sequence, their rotary parts behind query and key."""
        ends = (self.query_lengths, self.key_lengths) if layouts.is_packed(self.layout) else (None, None)
        q = layouts.to_nsd(self.operator, self.layout, self.heads, "query", query, ends[0])
        k, v = (self._keys(name, t, len(q), ends[1]) for name, t in (("key", key), ("value", value)))
        if self.query_rope is not None and self.key_rope is not None:
            ropes = layouts.to_nsd(self.operator, self.layout, self.heads, "query_rope", self.query_rope, ends[0])
            q = [torch.cat(pair, -1) for pair in zip(q, ropes)]
            ropes = self._keys("key_rope", self.key_rope, len(q), ends[1])
            k = [torch.cat(pair, -1) for pair in zip(k, ropes)]
            sizes = {self.query_rope.shape[-1] // (self.heads if "H" in self.layout[:3] else 1), ropes[0].shape[-1]}
            require(sizes == {ROTARY}, self.operator, f"the rotary parts must have {ROTARY} features, got {sizes}")
        require(len(q) == len(k), self.operator, f"query has {len(q)} sequences, key {len(k)}")
        return q, k, v

    def _keys(self, name: str, tensor: Tensor, batch: int, ends: list[int] | None) -> list[Tensor]:
        if self.block_table is None:
            parts = layouts.to_nsd(self.operator, self.layout, self.kv_heads, name, tensor, ends)
            if layouts.is_packed(self.layout):
                return parts
            lengths = layouts.actual_lengths(
                self.operator, "actual lengths of key", self.key_lengths, batch, parts[0].shape[1]
            )
            return [part[:, :n] for part, n in zip(parts, lengths)]
        longest = self.block_table.shape[-1] * self.block_size
        lengths = layouts.actual_lengths(self.operator, "actual lengths of key", self.key_lengths, batch, longest)
        return layouts.from_blocks(
            self.operator, name, tensor, self.kv_heads, self.block_size, self.block_table, lengths
        )

    def _require_sizes(self, q: list[Tensor], k: list[Tensor], v: list[Tensor]) -> None:
        operator, rope = self.operator, self.query_rope is not None
        d_q, d_k, d_v = (t[0].shape[-1] - ROTARY * (rope and t is not v) for t in (q, k, v))
        given = f"got {d_q}, {d_k}, {d_v}"
        packed, one = layouts.is_packed(self.layout), not layouts.is_packed(self.layout) and q[0].shape[1] == 1
        require(d_q == d_k <= 512 and d_q % 16 == 0, operator, f"head sizes must be equal, 16 to 512 by 16, {given}")
        if rope:
            require(d_q == d_v in (128, LATENT), operator, f"with rotary parts head sizes must be 128 or 512, {given}")
        if rope and d_q == LATENT:
            self._require_latent(q[0].shape[1])
        elif packed:
            sizes = {(64, 64), (128, 128), (192, 128)} | ({(192, 192)} if self.layout == "TND" else set())
            require((d_q, d_v) in sizes, operator, f"sequences of several lengths take head sizes {sizes}, {given}")
        else:
            require(d_q == d_v, operator, f"key and value must have the same shape, {given}")
        if self.sink is not None:
            require(d_v <= 128, operator, f"learnable_sink takes head sizes of value up to 128, got {d_v}")
        if self.block_table is not None:
            most = 1024 if packed or rope else 512
            fits = 0 < self.block_size <= most and self.block_size % (16 if packed or rope or one else 128) == 0
            require(fits, operator, f"block_size {self.block_size} is not one that the device takes")
        if one:
            require(k[0].shape[1] <= 262144, operator, "one query takes at most 262144 keys")
            require(self.inner_precise in (0, 1), operator, "one query takes inner_precise 0 or 1")
        elif self.layout == "BNSD_NBSD":
            require(q[0].shape[1] <= 16, operator, f"BNSD_NBSD takes at most 16 queries, got {q[0].shape[1]}")

    def _require_latent(self, queries: int) -> None:
        """Refuse what latents may not have: CheckFeatureMlaNoquant of op_host/fused_infer_attention_score_tiling_check.

        Before CANN 8.5 they lie in pages: op-plugin 7.2.0, docs/context/torch_npu-npu_fused_infer_attention_score.md.
        """
        operator, mask = self.operator, self.mask
        fits = self.kv_heads == 1 and self.heads in (1, 2, 4, 8, 16, 32, 64, 128)
        rule = f"latent attention takes 1, 2, 4, ... 128 heads and one of key, got {self.heads}, {self.kv_heads}"
        require(fits and self.sparse_mode in (DEFAULT_MASK, RIGHT_DOWN_CAUSAL, BAND), operator, rule)
        require(self.layout in LATENT_LAYOUTS, operator, f"latent attention takes the layouts {LATENT_LAYOUTS}")
        is_dense = mask is not None and self.sparse_mode == DEFAULT_MASK
        require(not is_dense or mask.dim() > 2, operator, "latent attention takes no mask of two dimensions")  # type: ignore[union-attr]
        since = (8, 5)
        require_before(since, self.block_table is not None, operator, "latents have to lie in pages")
        require_before(since, self.heads in (32, 64, 128), operator, "latent attention takes 32, 64 or 128 heads")
        is_masked = self.sparse_mode == RIGHT_DOWN_CAUSAL and mask is not None
        is_said = 1 <= queries <= 16 and (mask is None if queries == 1 else is_masked)
        rule = "latents take one query without a mask, or 2 to 16 with that of sparse_mode 3"
        require_before(since, is_said, operator, rule)

    # ---- one sequence, [N, S, D] ----------------------------------------------------------------------------------
    def _sequence(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out = q.new_zeros(*q.shape[:2], v.shape[-1])
        lse = torch.full((*q.shape[:2], 1), torch.inf)
        valid = q.shape[1]
        if self.query_lengths is not None and not layouts.is_packed(self.layout) and valid > 1:
            # one query is always valid: the decode branch does not read its length
            lengths = self.query_lengths * (i + 1) if len(self.query_lengths) == 1 else self.query_lengths
            valid = lengths[i] if i < len(lengths) else -1
            rule = f"actual lengths of query must be in [0, {q.shape[1]}], one for all or for each, got {lengths}"
            require(0 <= valid <= q.shape[1], self.operator, rule)
        if valid == 0 or k.shape[1] == 0:
            return out, lse
        groups = self.heads // self.kv_heads
        k, v = (t.repeat_interleave(groups, 0).float() for t in (k, v))
        scores = q[:, :valid].float() @ k.mT * self.scale
        if self.pse is not None:
            scores = scores + self._bias(i, q.shape[1], scores.shape)
        hidden = self._hidden(i, q.shape[1], *scores.shape[1:])
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        maximum = scores.amax(-1, keepdim=True)
        if self.sink is not None:
            sink = self.sink.float().view(-1, 1, 1)
            maximum = torch.maximum(maximum, sink)
        empty = maximum == -torch.inf
        weights = torch.exp(scores - maximum.masked_fill(empty, 0.0))
        total = weights.sum(-1, keepdim=True)
        if self.sink is not None:
            total = total + torch.exp(sink - maximum)
        found = (weights.to(q.dtype).float() @ v / total.masked_fill(empty, 1.0)).to(q.dtype)
        if bool(empty.any()) and not self._defines_empty_rows(valid, k.shape[1]):
            warnings.warn(
                f"{self.operator}: atten_mask leaves a row nothing to attend to. Without inner_precise 2 or 3 the "
                "device does not define such a row; it is zero here, and NaN in softnpu.poisoned_memory()",
                stacklevel=2,
            )
            if memory_poisoning.active:
                found = found.masked_fill(empty, torch.nan)
        out[:, :valid] = found
        lse[:, :valid] = (maximum + total.log()).masked_fill(empty, torch.inf)
        return out, lse

    def _defines_empty_rows(self, s_q: int, s_k: int) -> bool:
        return self.inner_precise in (2, 3) or (self.sparse_mode == RIGHT_DOWN_CAUSAL and s_q > s_k)

    def _bias(self, i: int, s_q: int, shape: torch.Size) -> Tensor:
        pse: Tensor = self.pse  # type: ignore[assignment]
        rule = f"pse_shift must be [1 or B, {self.heads}, {s_q} or more, keys or more], got {describe(pse)}"
        fits = pse.dim() == 4 and pse.shape[1] == shape[0] and pse.shape[2] >= s_q and pse.shape[3] >= shape[2]
        require(fits and (pse.shape[0] == 1 or i < pse.shape[0]), self.operator, rule)
        require(not layouts.is_packed(self.layout), self.operator, "several lengths take no pse_shift")
        require(pse.is_contiguous(), self.operator, "pse_shift must be contiguous")
        return pse[0 if pse.shape[0] == 1 else i, :, : shape[1], : shape[2]].float()

    def _hidden(self, i: int, s_q: int, valid: int, s_k: int) -> Tensor | None:
        """Mark what the mask and the window leave out of one sequence."""
        one = s_q == 1 and not layouts.is_packed(self.layout) and self.query_rope is None
        mode = DEFAULT_MASK if one else self.sparse_mode
        if self.mask is None:
            require(mode == DEFAULT_MASK, self.operator, f"sparse_mode {mode} needs atten_mask")
            return None
        mask = self.mask
        require(mask.dtype in (torch.bool, torch.int8, torch.uint8), self.operator, f"atten_mask is {describe(mask)}")
        require(mask.is_contiguous(), self.operator, "atten_mask must be contiguous")
        if mode in (LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND):
            square = mask.dim() in (2, 3, 4) and mask.numel() == COMPRESSED**2 == mask.shape[-1] ** 2
            rule = f"sparse_mode {mode} takes the upper triangle of {COMPRESSED} x {COMPRESSED} as atten_mask"
            triangle = torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
            require(square, self.operator, rule)
            require_values(torch.equal(mask.view(COMPRESSED, COMPRESSED).bool(), triangle), self.operator, rule)
            if mode == BAND:
                return outside(valid, s_k, s_k - valid, self.before, self.behind)
            return outside(valid, s_k, 0 if mode == LEFT_UP_CAUSAL else s_k - valid, UNBOUNDED, 0)
        hidden = self._dense(mask, i, s_q, one)[:valid, :s_k].bool()
        rule = f"atten_mask must reach over {s_k} keys, got {describe(mask)}"
        require(hidden.shape == (valid, s_k), self.operator, rule)
        if one:
            rule = f"a mask does not hide keys behind {MASKED_KEYS_OF_ONE_QUERY} from one query: give actual lengths"
            require(s_k <= MASKED_KEYS_OF_ONE_QUERY, self.operator, rule)
        return hidden if one or mode == ALL_MASK else hidden | outside(valid, s_k, 0, self.before, self.behind)

    def _dense(self, mask: Tensor, i: int, s_q: int, one: bool) -> Tensor:
        """Return the rows and keys of one sequence: [Sq, Sk], [B or 1, Sq, Sk], [B or 1, 1, Sq, Sk], [B, Sk]."""
        rule = (
            f"atten_mask must be (1, Sq, Sk), (1 or B, 1, Sq, Sk), or (Sq, Sk), for one query (B, Sk): {describe(mask)}"
        )
        if mask.dim() == 2:
            return mask[i : i + 1] if one else mask
        if mask.dim() == 4:
            require(mask.shape[1] == 1, self.operator, rule)
            mask = mask[:, 0]
        fits = mask.dim() == 3 and mask.shape[1] >= s_q and (mask.shape[0] == 1 or i < mask.shape[0])
        require(fits, self.operator, rule)
        return mask[0 if mask.shape[0] == 1 else i]
