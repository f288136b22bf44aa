"""Sequences that devices share: each gathers what its own tokens see, or exchanges tokens of all heads for all of some.

torch gives each device a block of a sequence, or two where it balances the load: of eight blocks the first of four
devices has the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# the groups that were made of a group, by how many neighbours there are: those of this device, and one of each
_made: WeakIdKeyDictionary = WeakIdKeyDictionary()


@dataclass(frozen=True)
class Split:
    """Says how the devices of a group share a sequence."""

    group: dist.ProcessGroup
    rank: int  # the rank of this device
    ranks: int
    is_balanced: bool  # whether each has two blocks, one from the front and one from the end, in place of one

    def blocks(self, rank: int) -> tuple[int, ...]:
        """Return which blocks of a sequence a device has."""
        return (rank, 2 * self.ranks - 1 - rank) if self.is_balanced else (rank,)

    def grouped(self, size: int) -> tuple[Split, Split]:
        """Return how groups of so many neighbours share what they have together, and how they share the sequence.

        For example, two of four devices have the blocks 0 and 7, 1 and 6. Together these are 0, 1, 6 and 7, which they
        share as any two devices do; and they are the blocks 0 and 3, twice as large, of what two groups share.
        """
        is_all = size == self.ranks
        inner, outer = (self.group, self.group) if is_all or size == 1 else self._groups(size)
        number, place = divmod(self.rank, size)
        return (
            Split(inner, place, size, self.is_balanced),
            Split(outer, number, self.ranks // size, self.is_balanced and not is_all),
        )

    def _groups(self, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Return the group of this device and its neighbours, and that of one of each: all have to call this."""
        made = _made.setdefault(self.group, {})
        if size not in made:
            ranks = dist.get_process_group_ranks(self.group)
            place = self.rank % size
            first = self.rank - place
            backend: Any = self.group._get_backend(self.group._device_types[0])
            timeout = getattr(getattr(backend, "options", None), "_timeout", None)  # torch would take its own default
            made[size] = tuple(
                dist.new_group(members, timeout, use_local_synchronization=True)
                for members in (ranks[first : first + size], ranks[place::size])
            )
        return made[size]

    def gather(self, *parts: Tensor) -> Iterator[list[Tensor]]:
        """Give the blocks of all devices in the order of the sequence, of each part ``[B, tokens, ...]``."""
        sent = ((part.new_empty(self.ranks, *part.shape), part) for part in parts)
        return map(self._in_order, self._arriving(dist.all_gather_into_tensor, sent))

    def scatter(self, wholes: Iterable[Tensor]) -> Iterator[Tensor]:
        """Give the sum over all devices of the part of this one, of each ``[B, tokens of all, ...]``."""
        parts = map(self._by_rank, wholes)
        return self._arriving(dist.reduce_scatter_tensor, ((torch.empty_like(part[0]), part) for part in parts))

    def all_tokens(self, *parts: Tensor) -> Iterator[Tensor]:
        """Give all tokens of the heads of this device, of its parts ``[B, tokens, N, ...]``, in exchange for others.

        Of N heads each device gets the next N / ranks.
        """
        by_heads = (part.unflatten(2, (self.ranks, -1)).movedim(2, 0) for part in parts)
        return (torch.cat(self._in_order(arrived), dim=1) for arrived in self._exchange(by_heads))

    def own_tokens(self, *wholes: Tensor) -> Iterator[Tensor]:
        """Give what `all_tokens` was given, of what it gave: ``[B, tokens of all, N / ranks, ...]``."""
        return (arrived.movedim(0, 2).flatten(2, 3) for arrived in self._exchange(map(self._by_rank, wholes)))

    def _exchange(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        sent = ((torch.empty_like(part, memory_format=torch.contiguous_format), part) for part in parts)
        return self._arriving(dist.all_to_all_single, sent)

    def _arriving(self, collective: Callable, messages: Iterable[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
        """Give what arrives, of tensors that it arrives in and those that are sent.

        All are on their way before the first is waited for: while a device makes the next, or puts in order what has
        come, the others travel.
        """
        travelling = []
        for arriving, sent in messages:
            sent = sent.contiguous()
            travelling.append((arriving, sent, collective(arriving, sent, group=self.group, async_op=True)))
        while travelling:
            arriving, sent, work = travelling.pop(0)
            work.wait()
            del sent, work
            yield arriving

    def _in_order(self, parts: Tensor) -> list[Tensor]:
        """Return the blocks of a sequence, of what the devices have of it: ``[ranks, B, tokens, ...]``."""
        blocks: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            owned = self.blocks(rank)
            blocks.update(zip(owned, part.chunk(len(owned), dim=1)))
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
    """Gathers ranges of whole sequences, one behind the other: of each ``[B, tokens, N, D]`` they are ``[T, N, D]``.

    Args:
        reach: how many keys in front of a block its queries see at most: of each block only so many at its end are
            sent, where those are fewer than it has.
    """

    @staticmethod
    def forward(ctx: Any, split: Split, ranges: tuple[Range, ...], reach: int | None, *parts: Tensor) -> tuple:
        own = split.blocks(split.rank)
        size = parts[0].shape[1] // len(own)
        reach = size if reach is None else min(max(reach, 1), size)
        ctx.batch, ctx.split, ctx.ranges, ctx.own, ctx.size, ctx.reach = len(parts[0]), split, ranges, own, size, reach
        skipped = size - reach
        sent = (part.unflatten(1, (len(own), size))[:, :, skipped:].flatten(1, 2) for part in parts)
        gathered = []
        for part, arrived in zip(parts, split.gather(*sent)):
            blocks = [(block, skipped) for block in arrived]
            for place, block in zip(own, part.chunk(len(own), dim=1)):
                blocks[place] = block, 0
            pieces = []
            for row, begin, end in ranges:
                for place in range(begin // size, -(-end // size)):
                    block, first = blocks[place]
                    first += place * size
                    pieces.append(block[row, max(begin - first, 0) : end - first])
            gathered.append(torch.cat(pieces))
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        own_gradients: list[Tensor] = []
        found = list(ctx.split.scatter(_sent_back(ctx, gradient, own_gradients) for gradient in gradients))
        for part, arrived in zip(own_gradients, found):
            part[:, :, ctx.size - ctx.reach :] += arrived.unflatten(1, (len(ctx.own), ctx.reach))
        return None, None, None, *([part.flatten(1, 2) for part in own_gradients] or found)


def _sent_back(ctx: Any, gradient: Tensor, own_gradients: list[Tensor]) -> Tensor:
    """Return the gradient of what all devices have sent, and add that of what this one has not to a list."""
    number, size, reach, rest = len(ctx.own), ctx.size, ctx.reach, gradient.shape[1:]
    sent = gradient.new_zeros(ctx.batch, number * reach * ctx.split.ranks, *rest)
    pieces = gradient.split([end - begin for _, begin, end in ctx.ranges])
    if reach == size:
        for (row, begin, end), piece in zip(ctx.ranges, pieces):
            sent[row, begin:end] += piece
        return sent
    part = gradient.new_empty(ctx.batch, number, size, *rest)
    for (row, begin, end), piece in zip(ctx.ranges, pieces):  # the end of the block before, and a whole own one
        place = (end - 1) // size
        before = place * size - begin
        sent[row, place * reach - before : place * reach] = piece[:before]
        part[row, ctx.own.index(place)] = piece[before:]
    own_gradients.append(part)
    return sent


class Exchange(torch.autograd.Function):
    """Exchanges tokens for heads, as `Split.all_tokens` does, or heads for tokens."""

    @staticmethod
    def forward(ctx: Any, split: Split, for_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.split, ctx.for_heads = split, for_heads
        return tuple((split.all_tokens if for_heads else split.own_tokens)(*tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.split.own_tokens if ctx.for_heads else ctx.split.all_tokens
        return None, None, *back(*gradients)
