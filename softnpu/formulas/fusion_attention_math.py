"""Compute npu_fusion_attention, ``dropout(softmax(mask(scale · (pse + q · kᵀ)))) · v``, and its gradient.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention_v3.md, and the
checks in op_plugin/ops/opapi/FlashAttentionKernelNpuOpApi.cpp. Rounding is inferred, not documented: products take
operands in the dtype of q and add up in float32, softmax is in float32, the result is rounded once.

A row without any position to attend to is zero where the operator is told to expect it (``inner_precise`` 2) or can
tell by itself (``sparse_mode`` 3). Elsewhere its content is not defined: zero with a warning, NaN in poisoned memory.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, float32

from softnpu import memory_poisoning
from softnpu.argument_checks import FLOATING, describe, require, require_dtypes
from softnpu.formulas.fusion_attention_layouts import from_bnsd, join, like_query, sequences, to_bnsd
from softnpu.randomness import seeded

UNBOUNDED = 2147483647
STATISTICS = 8  # the maximum and the sum of a row are written eight times
COMPRESSED = 2048  # the size of the mask that the causal and band modes share

DEFAULT_MASK, ALL_MASK, LEFT_UP_CAUSAL, RIGHT_DOWN_CAUSAL, BAND = range(5)


@dataclass(frozen=True)
class Attention:
    """Hold the arguments that forward and backward have in common."""

    operator: str
    head_num: int
    layout: str
    pse: Tensor | None
    padding_mask: Tensor | None
    atten_mask: Tensor | None
    scale: float
    keep_prob: float
    pre_tockens: int
    next_tockens: int
    inner_precise: int
    query_ends: list[int] | None
    key_ends: list[int] | None
    sparse_mode: int
    softmax_layout: str
    sink: Tensor | None
    random: tuple[int, int]  # seed and offset of the dropout mask

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result in the layout of the query, and the maximum and the sum of every row of the softmax."""
        q, k, v = self._enter(query, key, value)
        parts = [self._sequence(i, *tensors) for i, tensors in enumerate(self._sequences(q, k, v))]
        out, maximum, total = (join(list(column), q.shape[2]) for column in zip(*parts))
        return from_bnsd(self.layout, out), self._statistics(maximum), self._statistics(total)

    def backward(self, query: Tensor, key: Tensor, value: Tensor, dy: Tensor, out: Tensor | None) -> tuple:
        """Compute the gradients of query, key, value and sink; the softmax is computed again."""
        q, k, v = self._enter(query, key, value)
        if out is None or dy.shape != out.shape:
            given = "nothing" if out is None else describe(out)
            raise RuntimeError(f"{self.operator}: attention_in must have the shape of dy {describe(dy)}, got {given}")
        dy, out = (like_query(self.layout, self.head_num, t) for t in (dy, out))
        parts = [self._gradients(i, *tensors) for i, tensors in enumerate(self._sequences(q, k, v, dy, out))]
        dq, dk, dv, dsink = zip(*parts)
        lengths = q.shape[2], k.shape[2], v.shape[2]
        gradients = [from_bnsd(self.layout, join(list(d), n)) for d, n in zip((dq, dk, dv), lengths)]
        return *gradients, None if self.sink is None else torch.stack(dsink).sum(0)

    # ---- what is accepted -----------------------------------------------------------------------------------------
    def _enter(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        operator, n = self.operator, self.head_num
        require_dtypes(operator, {(d, d, d) for d in FLOATING}, query=query, key=key, value=value)
        require(n > 0, operator, f"head_num must be positive, got {n}")
        q, k, v = to_bnsd(operator, self.layout, n, query, key, value)
        require(self.padding_mask is None, operator, "padding_mask is not supported")
        require(0 < self.keep_prob <= 1, operator, f"keep_prob must be in (0, 1], got {self.keep_prob}")
        require(0 <= self.sparse_mode <= 8, operator, f"sparse_mode must be in [0, 8], got {self.sparse_mode}")
        if self.sparse_mode > BAND:
            raise NotImplementedError(f"{operator}: the software device has no formula for sparse_mode > {BAND}")
        varlen = self.query_ends is not None and self.key_ends is not None
        rule = "the layout TND takes actual_seq_qlen and actual_seq_kvlen, no other layout does"
        require((self.layout == "TND") == varlen, operator, rule)
        rule = "softmax_layout must be empty or, in the layout TND, 'TND'"
        require(self.softmax_layout == "" or self.softmax_layout == self.layout == "TND", operator, rule)
        require(q.shape[0] == k.shape[0] == v.shape[0], operator, "query, key and value differ in batch size")
        rule = f"head_num ({n}) must be the query's number of heads ({q.shape[1]}) and at most 256"
        require(q.shape[1] == n <= 256, operator, rule)
        rule = f"query has {n} heads, which is no multiple of the {k.shape[1]} and {v.shape[1]} of key and value"
        require(k.shape[1] == v.shape[1] > 0 and n % k.shape[1] == 0, operator, rule)
        rule = f"head sizes must be Dq = Dk >= Dv, at most 768, got {q.shape[3]}, {k.shape[3]}, {v.shape[3]}"
        require(768 >= q.shape[3] == k.shape[3] >= v.shape[3] > 0, operator, rule)
        require(k.shape[2] == v.shape[2], operator, "key and value differ in sequence length")
        for name, tensor, dtypes in (
            ("pse", self.pse, (query.dtype,)),
            ("atten_mask", self.atten_mask, (torch.bool, torch.uint8)),
            ("sink", self.sink, (float32,)),
        ):
            if tensor is not None:
                require(tensor.dtype in dtypes, operator, f"{name} must be {dtypes}, got {describe(tensor)}")
        if self.sink is not None:
            require(self.sink.shape == (n,), operator, f"sink must have the shape [{n}], got {describe(self.sink)}")
        return [q, k, v]

    def _sequences(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Split the tensors by sequence; the second and third, key and value, follow the keys' lengths."""
        ends = [self.key_ends if i in (1, 2) else self.query_ends for i in range(len(tensors))]
        return list(zip(*(sequences(tensor, end) for tensor, end in zip(tensors, ends)), strict=True))

    def _statistics(self, column: Tensor) -> Tensor:
        """Write a column eight times: [B, N, S, 8]; for TND [T, N, 8], by default the same values in the order N, T."""
        column = column.expand(*column.shape[:3], STATISTICS)
        if self.layout != "TND":
            return column.contiguous()
        n, t = column.shape[1:3]
        if self.softmax_layout == "TND":
            return column[0].transpose(0, 1).contiguous()
        return column[0].contiguous().view(t, n, STATISTICS)

    # ---- one sequence, [B, N, S, D] -------------------------------------------------------------------------------
    def _softmax(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return exp(score - maximum), the maximum and the sum of every row. The sink is one more score of the row."""
        scores = q.float() @ k.float().mT
        if self.pse is not None:
            scores = scores + self.pse.float()
        scores = scores * self.scale
        masked = self._masked(scores.shape)
        if masked is not None:
            scores = scores.masked_fill(masked, -torch.inf)
        if self.sink is not None:
            sink = self.sink.view(-1, 1, 1).expand(*scores.shape[:3], 1)
            maximum = torch.cat([scores, sink], -1).amax(-1, keepdim=True)
            weights = torch.exp(scores - maximum)
            return weights, maximum, weights.sum(-1, keepdim=True) + torch.exp(sink - maximum)
        maximum = scores.amax(-1, keepdim=True)
        empty = maximum == -torch.inf
        weights = torch.exp(scores - maximum.masked_fill(empty, 0.0))
        total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        if self.inner_precise != 2 and self.sparse_mode != RIGHT_DOWN_CAUSAL and bool(empty.any()):
            warnings.warn(
                f"{self.operator}: atten_mask leaves a row nothing to attend to. Without inner_precise=2 the device "
                "does not define the result of such a row; it is zero here, and NaN in softnpu.poisoned_memory()",
                stacklevel=2,
            )
            if memory_poisoning.active:
                total = total.masked_fill(empty, torch.nan)
        return weights, maximum, total

    def _sequence(self, i: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
        weights, maximum, total = self._softmax(q, k)
        out = (self._drop(weights, i).to(q.dtype).float() @ v.float()) / total
        return out.to(q.dtype), maximum, total

    def _gradients(self, i: int, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, out: Tensor) -> tuple:
        heads = (k.shape[1], q.shape[1] // k.shape[1])
        k, v = (t.repeat_interleave(heads[1], 1) for t in (k, v))
        weights, maximum, total = self._softmax(q, k)
        p, dy, out = weights / total, dy.float(), out.float()
        dv = self._drop(p, i).to(q.dtype).float().mT @ dy
        inner = (dy * out).sum(-1, keepdim=True)
        ds = (p * (self._drop(dy @ v.float().mT, i) - inner)).to(q.dtype).float() * self.scale
        dq, dk = ds @ k.float(), ds.mT @ q.float()
        dk, dv = (t.unflatten(1, heads).sum(2) for t in (dk, dv))
        dsink = None
        if self.sink is not None:
            dsink = -(torch.exp(self.sink.view(-1, 1, 1) - maximum) / total * inner).sum((0, 2, 3))
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dsink

    def _drop(self, weights: Tensor, i: int) -> Tensor:
        """Drop out weights, with the same mask in forward and backward."""
        if self.keep_prob == 1:
            return weights
        kept = torch.empty_like(weights).bernoulli_(
            self.keep_prob, generator=seeded(self.random[0], self.random[1] + i)
        )
        return weights * kept / self.keep_prob

    def _masked(self, shape: torch.Size) -> Tensor | None:
        """Mark the positions that are left out. Without a mask sparse_mode and the window have no effect."""
        if self.atten_mask is None:
            return None
        (b, n, s_q, s_k), mask = shape, self.atten_mask.bool()
        if self.sparse_mode in (DEFAULT_MASK, ALL_MASK):
            mask = mask[:s_q, :s_k] if self.layout == "TND" else mask
            shapes = ([b, n, s_q, s_k], [b, 1, s_q, s_k], [1, 1, s_q, s_k], [s_q, s_k])
            rule = f"atten_mask must have one of the shapes {shapes}, got {list(self.atten_mask.shape)}"
            require(list(mask.shape) in shapes, self.operator, rule)
            if self.sparse_mode == DEFAULT_MASK and min(self.pre_tockens, self.next_tockens) < max(s_q, s_k):
                outside = _outside(s_q, s_k, 0, self.pre_tockens, self.next_tockens)
                rule = "atten_mask keeps positions that pre_tockens and next_tockens leave out"
                require(bool((mask | ~outside).all()), self.operator, rule)
            return mask
        rule = f"sparse_mode {self.sparse_mode} takes the upper triangle of {COMPRESSED} x {COMPRESSED} as atten_mask"
        require(torch.equal(mask, _upper_triangle()), self.operator, rule)
        if self.sparse_mode == LEFT_UP_CAUSAL:
            return _outside(s_q, s_k, 0, UNBOUNDED, 0)
        if self.sparse_mode == RIGHT_DOWN_CAUSAL:
            return _outside(s_q, s_k, s_k - s_q, UNBOUNDED, 0)
        return _outside(s_q, s_k, s_k - s_q, self.pre_tockens, self.next_tockens)


def _outside(s_q: int, s_k: int, shift: int, before: int, behind: int) -> Tensor:
    """Mark keys outside the band that query i may see: i + shift - before to i + shift + behind."""
    distance = torch.arange(s_k) - torch.arange(s_q).unsqueeze(-1) - shift
    return (distance < -before) | (distance > behind)


@cache
def _upper_triangle() -> Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)
