"""A weight that is one shard of the vocabulary: what the other shards have to say is asked for by collectives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class AllReduce(Protocol):
    """Reduces a tensor over all shards."""

    def __call__(self, tensor: Tensor, operation: str) -> Tensor:
        """Return the "sum" or "max" of the tensors that all shards call this with, in the same order."""


@dataclass(frozen=True)
class Shard:
    """Which words a weight holds.

    Attributes:
        start: the first word of it.
        words: how many there are in all shards.
        all_reduce: ``all_reduce(tensor, "sum" or "max")`` returns what all shards have together.

    Example:
        >>> import torch
        >>> from torch import distributed
        >>> def all_reduce(tensor, operation):
        ...     distributed.all_reduce(tensor, getattr(distributed.ReduceOp, operation.upper()))
        ...     return tensor
        >>> shard = Shard(start=distributed.get_rank() * weight.shape[0], words=151936, all_reduce=all_reduce)
    """

    start: int
    words: int
    all_reduce: AllReduce

    def lse(self, lse: Tensor) -> Tensor:
        """Return ``log Σ exp`` over all words from that over the words of the shard."""
        largest = self.all_reduce(lse.clone(), "max")
        return largest + self.all_reduce(torch.exp(lse - largest), "sum").log()

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of all shards' tensors."""
        return self.all_reduce(tensor, "sum")
