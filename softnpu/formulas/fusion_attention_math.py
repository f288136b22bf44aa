"""Compute npu_fusion_attention, ``dropout(softmax(mask(scale · (pse + q · kᵀ)))) · v``, and its gradient.

Shapes, dtypes and limits: op-plugin, docs/zh/custom_APIs/torch_npu/torch_npu-npu_fusion_attention_v3.md, and the
checks in op_plugin/ops/opapi/FlashAttentionKernelNpuOpApi.cpp. Rounding is inferred, not documented: products take
operands in the dtype of q and add up in float32, softmax is in float32, the result is rounded once.

A row without any position to attend to is zero where the operator is told to expect it (``inner_precise`` 2) or can
tell by itself (``sparse_mode`` 3, a prefix). Elsewhere its content is not defined: zero with a warning, NaN in poisoned
memory. The layout TND takes no such row. The gradient of pse is memory that nobody writes.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from softnpu import memory_poisoning
from softnpu.argument_checks import FLOATING, describe, require, require_dtypes, require_values
from softnpu.cann import require_before
from softnpu.formulas import fusion_attention_sinks as sinks
from softnpu.formulas.dropout import drawn, kept
from softnpu.formulas.fusion_attention_layouts import from_bnsd, join, like_query, sequences, to_bnsd
from softnpu.formulas.fusion_attention_masks import BAND, BAND_LEFT_UP_CAUSAL, DEFAULT_MASK, Masking
from softnpu.formulas.fusion_attention_pse import ADD_MULTIPLY, PositionBias
from softnpu.formulas.fusion_attention_statistics import arrange, columns

MOST_SEQUENCES = 1024
LONGEST = 1_000_000


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
    prefix: list[int] | None = None
    pse_type: int = ADD_MULTIPLY
    shift: int = 0  # where the keys start, less where the queries start, for slopes
    dropout_mask: Tensor | None = None  # in place of the one that seed and offset give

    @cached_property
    def masking(self) -> Masking:
        """Say which positions are left out."""
        window = self.pre_tockens, self.next_tockens
        return Masking(self.operator, self.layout, self.atten_mask, self.sparse_mode, *window, self.prefix)

    @cached_property
    def bias(self) -> PositionBias:
        """Say what is added to the scores."""
        return PositionBias(self.operator, self.layout, self.pse, self.pse_type, self.sparse_mode, self.shift)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result in the layout of the query, and the maximum and the sum of every row of the softmax."""
        q, k, v = self._enter(query, key, value)
        parts = [self._sequence(i, *tensors) for i, tensors in enumerate(self._sequences(q, k, v))]
        out, *statistics = (list(column) for column in zip(*parts))
        maximum, total = (arrange(s, self.layout, self.softmax_layout, q.shape[2]) for s in statistics)
        return from_bnsd(self.layout, join(out, q.shape[2])), maximum, total

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dy: Tensor,
        out: Tensor | None,
        maximum: Tensor | None,
        total: Tensor | None,
    ) -> tuple:
        """Compute the gradients of query, key, value and sink from the result and the statistics of its rows.

        These may be of more keys than are given: a ring of devices calls this for the keys of each, with the result
        and the statistics of all (torch_npu 2.13.0, distributed/tensor/experimental/_context_parallel). Without
        statistics they are those of the keys that are given.
        """
        q, k, v = self._enter(query, key, value)
        if self.layout == "TND":
            self._require_packed_gradient(query)
        if self.sink is not None:
            sinks.require_gradient(self.operator, query)
        if out is None or dy.shape != out.shape:
            given = "nothing" if out is None else describe(out)
            raise RuntimeError(f"{self.operator}: attention_in must have the shape of dy {describe(dy)}, got {given}")
        dy, out = (like_query(self.layout, self.head_num, t) for t in (dy, out))
        saved = () if maximum is None or total is None else (self._column(maximum, q), self._column(total, q))
        parts = [self._gradients(i, *tensors) for i, tensors in enumerate(self._sequences(q, k, v, dy, out, *saved))]
        dq, dk, dv, dsink = zip(*parts)
        lengths = q.shape[2], k.shape[2], v.shape[2]
        gradients = [from_bnsd(self.layout, join(list(d), n)) for d, n in zip((dq, dk, dv), lengths)]
        if self.sink is None:
            return *gradients, None
        return *gradients, torch.stack(dsink).sum(0) if self._writes_sink(q, k) else unwritten(self.sink)

    def weights(self, query: Tensor, key: Tensor) -> int:
        """Count the weights of the softmax, which is the size of the dropout mask."""
        if self.lengths:
            return self.head_num * sum(q * k for q, k in self.lengths)
        batch_axis, sequence_axis = self.layout.index("B"), self.layout.index("S")
        return query.shape[batch_axis] * self.head_num * query.shape[sequence_axis] * key.shape[sequence_axis]

    # ---- what is accepted -----------------------------------------------------------------------------------------
    def _enter(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        operator, n = self.operator, self.head_num
        require_dtypes(operator, {(d, d, d) for d in FLOATING}, query=query, key=key, value=value)
        require(n > 0, operator, f"head_num must be positive, got {n}")
        q, k, v = to_bnsd(operator, self.layout, n, query, key, value)
        require(self.padding_mask is None, operator, "padding_mask is not supported")
        require(0 < self.keep_prob <= 1, operator, f"keep_prob must be in (0, 1], got {self.keep_prob}")
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
        if self.atten_mask is not None:
            rule = f"atten_mask must be {(torch.bool, torch.uint8)}, got {describe(self.atten_mask)}"
            require(self.atten_mask.dtype in (torch.bool, torch.uint8), operator, rule)
        if self.sink is not None:
            sinks.require_sink(operator, self.sink, n)
        if varlen:
            self._require_lengths(q.shape[2], k.shape[2])
        lengths = self.lengths or [(q.shape[2], k.shape[2])]
        self.masking.require_mode(len(lengths) if varlen else q.shape[0], self._longest(q, k))
        self.bias.require_kind(query.dtype, lengths)
        return [q, k, v]

    def _require_packed_gradient(self, query: Tensor) -> None:
        """Refuse what the forward takes and the gradient does not.

        CANN's ops-transformer, attention/flash_attention_score_grad: op_host, tiling_s1s2_bn2gs1s2.cpp, and of November
        2025 docs/aclnnFlashAttentionUnpaddingScoreGrad.md.
        """
        size = query.shape[-1]
        require_before((8, 5), size <= 512, self.operator, f"in the layout TND D is 1 to 512, got {size}")
        if self.sparse_mode in (DEFAULT_MASK, BAND):
            rule = "pre_token and next_token is invalid in the unpad scene, got "
            rule += f"pre_token {self.pre_tockens}, next_token {self.next_tockens}, sparse_mode {self.sparse_mode}"
            require(self.pre_tockens + self.next_tockens > 0, self.operator, rule)

    @cached_property
    def lengths(self) -> list[tuple[int, int]]:
        """The numbers of queries and keys of every sequence of TND; zeros at the end stand for absent ones."""
        ends = list(zip(self.query_ends or [], self.key_ends or []))
        while ends and ends[-1] == (0, 0):
            ends.pop()
        return [(q - q_before, k - k_before) for (q_before, k_before), (q, k) in zip([(0, 0), *ends], ends)]

    def _require_lengths(self, t_q: int, t_k: int) -> None:
        operator, given = self.operator, f"got {self.query_ends}, {self.key_ends}"
        same = len(self.query_ends or []) == len(self.key_ends or [])
        require(same, operator, f"actual_seq_qlen and actual_seq_kvlen differ in length: {given}")
        fits = bool(self.lengths) and all(q >= 0 and k >= 0 for q, k in self.lengths)
        fits = fits and sum(q for q, _ in self.lengths) <= t_q and sum(k for _, k in self.lengths) <= t_k
        require(fits, operator, f"cumulative lengths must not fall, nor pass {t_q} queries and {t_k} keys: {given}")
        most = f"TND takes at most {MOST_SEQUENCES} sequences and {LONGEST} tokens"
        require(len(self.query_ends or []) <= MOST_SEQUENCES and max(t_q, t_k) <= LONGEST, operator, most)
        require(all(k > 0 for q, k in self.lengths if q > 0), operator, f"queries need keys in every sequence: {given}")

    @cached_property
    def _band(self) -> int:
        """The sequence that modes 7 and 8 give the window to."""
        filled = [j for j, pair in enumerate(self.lengths) if min(pair) > 0] or [0]
        return filled[0] if self.sparse_mode == BAND_LEFT_UP_CAUSAL else filled[-1]

    def _sequences(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Split the tensors by sequence; the second and third, key and value, follow the keys' lengths."""
        if not self.lengths:
            return [tensors]
        query_lengths, key_lengths = zip(*self.lengths)
        counts = [key_lengths if i in (1, 2) else query_lengths for i in range(len(tensors))]
        return list(zip(*(sequences(tensor, count) for tensor, count in zip(tensors, counts)), strict=True))

    def _column(self, statistics: Tensor, q: Tensor) -> Tensor:
        """Return one of eight equal values of each row, ``[B, N, S, 1]``."""
        query_lengths = [queries for queries, _ in self.lengths]
        return columns(self.operator, statistics, self.layout, self.softmax_layout, q, query_lengths)

    def _longest(self, q: Tensor, k: Tensor) -> tuple[int, int]:
        """Return how many queries and keys there are, of packed sequences in the longest."""
        queries, keys = zip(*(self.lengths or [(q.shape[2], k.shape[2])]))
        return max(queries), max(keys)

    def _writes_sink(self, q: Tensor, k: Tensor) -> bool:
        """Tell whether the template that is taken writes the gradient of a sink."""
        longest = self._longest(q, k)
        plain = self.keep_prob == 1 and self.pse is None and self.pse_type == ADD_MULTIPLY
        without = sinks.has_template_without_sink(
            self.layout, q.shape[3], longest, self.atten_mask, self.sparse_mode, plain
        )
        return not without and not sinks.loses_a_piece(len(self.lengths) or q.shape[0], longest)

    # ---- one sequence, [B, N, S, D] -------------------------------------------------------------------------------
    def _softmax(self, i: int, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return exp(score - maximum), the maximum and the sum of every row. The sink is one more score of the row."""
        lengths = self.lengths or [(q.shape[2], k.shape[2])]
        scores = self.bias.added(q.float() @ k.float().mT, self.scale, i, lengths)
        hidden = self.masking.hidden(scores.shape, i, i == self._band)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.layout == "TND":
                rule = f"sequence {i} has queries without any key to attend to, which the layout TND does not take"
                require_values(not bool(hidden.all(-1).any()), self.operator, rule)
        if self.sink is not None:
            sink = self.sink.view(-1, 1, 1).expand(*scores.shape[:3], 1)
            maximum = torch.cat([scores, sink], -1).amax(-1, keepdim=True)
            weights = torch.exp(scores - maximum)
            return weights, maximum, weights.sum(-1, keepdim=True) + torch.exp(sink - maximum)
        maximum = scores.amax(-1, keepdim=True)
        empty = maximum == -torch.inf
        weights = torch.exp(scores - maximum.masked_fill(empty, 0.0))
        total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
        defined = self.inner_precise == 2 or self.masking.defines_empty_rows(*scores.shape[2:])
        if not defined and bool(empty.any()):
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
        if q.shape[2] == 0:
            column = torch.empty(*q.shape[:3], 1)
            return q.new_empty(*q.shape[:3], v.shape[3]), column, column
        weights, maximum, total = self._softmax(i, q, k)
        out = (self._drop(weights, i).to(q.dtype).float() @ v.float()) / total
        return out.to(q.dtype), maximum, total

    def _gradients(self, i: int, q: Tensor, k: Tensor, v: Tensor, dy: Tensor, out: Tensor, *saved: Tensor) -> tuple:
        if q.shape[2] == 0:
            return q, torch.zeros_like(k), torch.zeros_like(v), torch.zeros(q.shape[1])
        heads = (k.shape[1], q.shape[1] // k.shape[1])
        k, v = (t.repeat_interleave(heads[1], 1) for t in (k, v))
        weights, maximum, total = self._softmax(i, q, k)
        if saved:
            highest, (maximum, total) = maximum, saved
            weights = weights * torch.exp((highest - maximum).masked_fill(highest == -torch.inf, 0.0))
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
        """Drop out weights, with the same mask in forward and backward: its bits are in the order of the sequences."""
        if self.keep_prob == 1:
            return weights
        sizes = [self.head_num * q * k for q, k in self.lengths] or [weights.numel()]
        mask = self._bits(sum(sizes))
        return weights * kept(mask, sum(sizes[:i]), weights.shape) / self.keep_prob

    def _bits(self, count: int) -> Tensor:
        """Return the mask for so many weights, as ``_npu_dropout_gen_mask`` makes it."""
        if self.dropout_mask is None:
            return drawn(self.operator, count, 1 - self.keep_prob, *self.random)
        mask, rule = self.dropout_mask, f"dropout_mask must have a bit for each of {count} weights, as uint8"
        fits = mask.dtype == torch.uint8 and 8 * mask.numel() >= count
        require(fits, self.operator, f"{rule}, got {describe(mask)}")
        return mask.flatten()


def unwritten(tensor: Tensor | None) -> Tensor | None:
    """Make what the device allocates for a gradient that it does not compute."""
    return None if tensor is None else torch.full_like(tensor, torch.nan, memory_format=torch.contiguous_format)
