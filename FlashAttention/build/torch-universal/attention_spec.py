"""What an attention computes, beside its tensors: which keys a query sees, and how scores become weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Band(NamedTuple):
    """Says which keys a query sees by their distance.

    Query ``i`` of ``S_q`` stands at key ``i + S_k - S_q``, the last one at the last key, or at key ``i``, and sees
    ``left`` keys before it and ``right`` behind it.

    Attributes:
        left: how many keys before its own a query sees; None for all.
        right: how many keys behind its own a query sees; None for all.
        from_start: whether the first query stands at the first key, however many there are of both.
    """

    left: int | None = None
    right: int | None = None
    from_start: bool = False

    def shift(self, queries: int, keys: int) -> int:
        """Return at which key the first query stands."""
        return 0 if self.from_start else keys - queries

    def within(self, queries: int, keys: int) -> Band:
        """Return the same band without the limits that so many queries and keys never reach."""
        shift = self.shift(queries, keys)
        left = None if self.left is None or self.left >= queries - 1 + shift else self.left
        right = None if self.right is None or self.right >= keys - 1 - shift else self.right
        return Band(left, right, self.from_start and (left, right) != (None, None))

    def leaves_rows_empty(self, queries: int, keys: int) -> bool:
        """Tell whether a query sees no key: the first ones, or the last ones."""
        shift = self.shift(queries, keys)
        before = self.right is not None and shift + self.right < 0
        behind = self.left is not None and queries - 1 + shift - self.left > keys - 1
        return keys == 0 or before or behind


class Sequences(NamedTuple):
    """Says where sequences end that lie one behind the other, those of the queries and those of the keys."""

    ends: tuple[int, ...]
    key_ends: tuple[int, ...]

    def lengths(self) -> list[tuple[int, int]]:
        """Return how many queries and how many keys each sequence has."""
        starts = zip((0, *self.ends), (0, *self.key_ends))
        return [(end - start, key_end - key_start) for (end, key_end), (start, key_start) in zip(zip(*self), starts)]

    def without_empty(self) -> Sequences:
        """Leave out the sequences that have neither queries nor keys."""
        kept = [ends for ends, lengths in zip(zip(*self), self.lengths()) if any(lengths)]
        return Sequences(*(tuple(column) for column in zip(*kept)))


FULL = Band()
CAUSAL = Band(None, 0)


@dataclass(frozen=True)
class Options:
    """Holds how scores become weights: ``softmax(cap(scale · q·kᵀ) + bias)``, with a sink and dropout.

    Attributes:
        scale: the factor of the scores.
        dropout: which part of the weights is dropped.
        sink: ``[N]``, one more score of every row of a head, whose value is zero.
        softcap: scores become ``softcap · tanh(score / softcap)``; 0 for none.
        slopes: ``[N]`` or ``[B, N]``, of ALiBi: ``-slope · |distance|`` is added to a score.
        bias: ``[B or 1, N or 1, S_q, S_k]``, added to the scores.
        deterministic: whether gradients have to be the same, bit for bit, in every run.
    """

    scale: float
    dropout: float = 0.0
    sink: Tensor | None = None
    softcap: float = 0.0
    slopes: Tensor | None = None
    bias: Tensor | None = None
    deterministic: bool = False

    def needs_torch(self) -> bool:
        """Tell whether no operator of torch_npu computes this."""
        return bool(self.softcap) or self.slopes is not None or self.bias is not None
