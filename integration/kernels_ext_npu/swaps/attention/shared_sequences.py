"""Sequences that devices share: each gathers what its own tokens see, or exchanges tokens of all heads for all of some.

torch gives each device a block of a sequence, or two where it balances the load: of eight blocks the first of four
devices has the first and the last.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """Says how the devices of a group share a sequence."""

    group: dist.ProcessGroup
    rank: int  # of this device
    ranks: int
    is_balanced: bool  # whether each has two blocks, one from the front and one from the end, in place of one

    def blocks(self, rank: int) -> tuple[int, ...]:
        """Return which blocks of a sequence a device has."""
        return (rank, 2 * self.ranks - 1 - rank) if self.is_balanced else (rank,)

    def gather(self, part: Tensor) -> list[Tensor]:
        """Return the blocks of all devices in the order of the sequence, of a part ``[B, tokens, ...]``."""
        gathered = part.new_empty(self.ranks, *part.shape)
        dist.all_gather_into_tensor(gathered, part.contiguous(), group=self.group)
        return self._in_order(gathered)

    def scatter(self, whole: Tensor) -> Tensor:
        """Return the sum over all devices of the part of this one, of ``[B, tokens of all, ...]``."""
        parts = self._by_rank(whole)
        part = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(part, parts, group=self.group)
        return part

    def all_tokens(self, part: Tensor) -> Tensor:
        """Return all tokens of the heads of this device, of its part ``[B, tokens, N, ...]``, in exchange for others.

        Of N heads each device gets the next N / ranks.
        """
        return torch.cat(self._in_order(self._exchange(part.unflatten(2, (self.ranks, -1)).movedim(2, 0))), dim=1)

    def own_tokens(self, whole: Tensor) -> Tensor:
        """Return what `all_tokens` was given, of what it returned: ``[B, tokens of all, N / ranks, ...]``."""
        return self._exchange(self._by_rank(whole)).movedim(0, 2).flatten(2, 3)

    def _exchange(self, parts: Tensor) -> Tensor:
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=self.group)
        return received

    def _in_order(self, parts: Tensor) -> list[Tensor]:
        """Return the blocks of a sequence, of what the devices have of it: ``[ranks, B, tokens, ...]``."""
        blocks: dict[int, Tensor] = {}
        for rank, of_rank in enumerate(parts):
            owned = self.blocks(rank)
            blocks.update(zip(owned, of_rank.chunk(len(owned), dim=1)))
        return [blocks[place] for place in sorted(blocks)]

    def _by_rank(self, whole: Tensor) -> Tensor:
        """Return what each device has of a sequence: the reverse of `_in_order`."""
        blocks = whole.chunk(self.ranks * len(self.blocks(0)), dim=1)
        parts = torch.cat([blocks[place] for rank in range(self.ranks) for place in self.blocks(rank)], dim=1)
        return parts.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous()


class Range(NamedTuple):
    """Keys of a row of the batch, by their places in the whole sequence."""

    row: int
    begin: int
    end: int


class Gather(torch.autograd.Function):
    """Gathers ranges of whole sequences, one behind the other: of ``[B, tokens, N, D]`` they are ``[T, N, D]``.

    Args:
        reach: how many keys in front of a block its queries see at most: of each block only so many at its end are
            sent, where those are fewer than it has.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, split: Split, ranges: tuple[Range, ...], reach: int | None) -> Tensor:
        own = split.blocks(split.rank)
        size = part.shape[1] // len(own)
        reach = size if reach is None else min(max(reach, 1), size)
        ctx.shape, ctx.split, ctx.ranges, ctx.own, ctx.size, ctx.reach = part.shape, split, ranges, own, size, reach
        skipped = size - reach
        sent = part.unflatten(1, (len(own), size))[:, :, skipped:].flatten(1, 2)
        blocks = [(block, skipped) for block in split.gather(sent)]
        for place, block in zip(own, part.chunk(len(own), dim=1)):
            blocks[place] = block, 0
        pieces = []
        for row, begin, end in ranges:
            for place in range(begin // size, -(-end // size)):
                block, first = blocks[place]
                first += place * size
                pieces.append(block[row, max(begin - first, 0) : end - first])
        return torch.cat(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        batch, _, *rest = ctx.shape
        size, reach, number = ctx.size, ctx.reach, len(ctx.own)
        sent = gradient.new_zeros(batch, number * reach * ctx.split.ranks, *rest)
        pieces = gradient.split([end - begin for _, begin, end in ctx.ranges])
        if reach == size:
            for (row, begin, end), piece in zip(ctx.ranges, pieces):
                sent[row, begin:end] += piece
            return ctx.split.scatter(sent), None, None, None
        part = gradient.new_empty(batch, number, size, *rest)
        for (row, begin, end), piece in zip(ctx.ranges, pieces):  # the end of the block before, and a whole own one
            place = (end - 1) // size
            before = place * size - begin
            sent[row, place * reach - before : place * reach] = piece[:before]
            part[row, ctx.own.index(place)] = piece[before:]
        part[:, :, size - reach :] += ctx.split.scatter(sent).unflatten(1, (number, reach))
        return part.flatten(1, 2), None, None, None


class Exchange(torch.autograd.Function):
    """Exchanges tokens for heads, as `Split.all_tokens` does, or heads for tokens."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, split: Split, for_heads: bool) -> Tensor:
        ctx.split, ctx.for_heads = split, for_heads
        return split.all_tokens(tensor) if for_heads else split.own_tokens(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.split.own_tokens if ctx.for_heads else ctx.split.all_tokens)(gradient), None, None
