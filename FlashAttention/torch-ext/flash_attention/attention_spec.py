"""What describes an attention beside its tensors: which keys a query sees, and how scores become weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Band(NamedTuple):
    """A sliding window: which keys a query sees by their distance.

    Query ``i`` of ``S_q`` is aligned with key ``i + S_k - S_q``, so that the last query stands at the last key, or with
    key ``i`` in a band of the upper left corner. It sees ``left`` keys before that one and ``right`` behind it.

    Attributes:
        left: how many keys before its own a query sees; None for all.
        right: how many keys behind its own a query sees; None for all.
        upper_left: whether the first query is aligned with the first key, as torch's ``causal_upper_left`` has it.
    """

    left: int | None = None
    right: int | None = None
    upper_left: bool = False

    def shift(self, queries: int, keys: int) -> int:
        """Return the index of the key that the first query is aligned with."""
        return 0 if self.upper_left else keys - queries

    def within(self, queries: int, keys: int) -> Band:
        """Return the same band, with None for each limit that so many queries and keys never reach."""
        shift = self.shift(queries, keys)
        left = None if self.left is None or self.left >= queries - 1 + shift else self.left
        right = None if self.right is None or self.right >= keys - 1 - shift else self.right
        return Band(left, right, self.upper_left and (left, right) != (None, None))

    def leaves_queries_without_keys(self, queries: int, keys: int) -> bool:
        """Tell whether some of so many queries see no key, be it the first ones or the last ones."""
        shift = self.shift(queries, keys)
        before = self.right is not None and shift + self.right < 0
        behind = self.left is not None and queries - 1 + shift - self.left > keys - 1
        return keys == 0 or before or behind


class SequenceEnds(NamedTuple):
    """Holds where packed sequences end: ``cu_seqlens`` of queries and of keys, without the zero they begin with."""

    ends: tuple[int, ...]
    key_ends: tuple[int, ...]

    def lengths(self) -> list[tuple[int, int]]:
        """Return how many queries and how many keys each sequence has."""
        starts = zip((0, *self.ends), (0, *self.key_ends))
        return [(end - start, key_end - key_start) for (end, key_end), (start, key_start) in zip(zip(*self), starts)]

    def longest(self) -> tuple[int, int]:
        """Return the largest number of queries and that of keys."""
        queries, keys = zip(*self.lengths())
        return max(queries), max(keys)

    def without_empty(self) -> SequenceEnds:
        """Return the same without the sequences that have neither queries nor keys."""
        kept = [ends for ends, lengths in zip(zip(*self), self.lengths()) if any(lengths)]
        return SequenceEnds(*(tuple(column) for column in zip(*kept)))

    def split(self, most: int) -> Iterator[tuple[slice, slice, SequenceEnds]]:
        """Yield ``most`` sequences at a time: where their queries and their keys lie, and where each ends there."""
        start = key_start = 0
        for first in range(0, len(self.ends), most):
            ends, key_ends = (each[first : first + most] for each in self)
            shifted = SequenceEnds(tuple(e - start for e in ends), tuple(e - key_start for e in key_ends))
            yield slice(start, ends[-1]), slice(key_start, key_ends[-1]), shifted
            start, key_start = ends[-1], key_ends[-1]


FULL = Band()
CAUSAL = Band(None, 0)


@dataclass(frozen=True)
class AttentionSpec:
    """Describes how scores become weights: ``softmax(cap(scale · q·kᵀ) + bias)``, with a sink and dropout.

    Attributes:
        scale: the factor of the scores.
        dropout: the probability with which a weight is dropped.
        sink: ``[N]``, one more score for each query of a head, whose value is zero.
        softcap: scores become ``softcap · tanh(score / softcap)``; 0 for none.
        alibi_slopes: ``[N]`` or ``[B, N]``: ``-slope · |distance|`` is added to a score.
        bias: ``[B or 1, N or 1, S_q, S_k]``, added to the scores.
        deterministic: whether gradients have to be the same, bit for bit, in every run.
    """

    scale: float
    dropout: float = 0.0
    sink: Tensor | None = None
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    deterministic: bool = False

    def needs_reference(self) -> bool:
        """Tell whether no operator of torch_npu computes this."""
        return bool(self.softcap) or self.alibi_slopes is not None or self.bias is not None
