"""Sequences of a batch that lie one behind the other in memory, and where their tokens are in it."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention_spec import CAUSAL, Band, Sequences
from ..ops.reference import outside
from ..selective_checkpoints import unseen


class Packing:
    """Says which tokens of a batch are in sequences of their own, one behind the other in memory.

    Args:
        sequences: where they end.
        band: which keys of its sequence a query sees.
        queries: the places in ``[B · S_q]`` of the queries that see a key, on the CPU; None for all.
        keys: the places in ``[B · S_k]`` of the keys that are seen, likewise.
    """

    def __init__(
        self, sequences: Sequences, band: Band, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> None:
        self.sequences, self.band = sequences, band
        self._places = queries, keys
        self._moved: dict[torch.device, tuple[Tensor | None, ...]] = {}
        self._left_out: dict[torch.device, Tensor | None] = {}
        self._tokens: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def places(self, device: torch.device) -> tuple[Tensor | None, ...]:
        """Return the places of queries and of keys, which are moved to a device once, without waiting."""
        if device not in self._moved:
            with unseen():
                queries, keys = self._places
                moved = _moved(keys, device)
                self._moved[device] = (moved if queries is keys else _moved(queries, device)), moved
        return self._moved[device]

    def is_of_itself(self) -> bool:
        """Tell whether the tokens that see keys are those that are seen, each in its own sequence."""
        return self.sequences.ends == self.sequences.key_ends and self._places[0] is self._places[1]

    def tokens(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return the places of the tokens in the batch, where sequences end among them, and where that of each begins.

        They are moved once, without waiting: int64 ``[T]``, int32 ``[sequences]`` and int64 ``[T]``.
        """
        if device not in self._tokens:
            with unseen():
                ends = torch.tensor(self.sequences.ends, device="cpu")
                lengths = torch.diff(ends, prepend=ends.new_zeros(1))
                places = torch.arange(int(ends[-1]), device="cpu") if self._places[0] is None else self._places[0]
                begins = places[(ends - lengths).clamp(max=len(places) - 1)].repeat_interleave(lengths)
                self._tokens[device] = tuple(_moved(each, device) for each in (places, ends.int(), begins))
        return self._tokens[device]

    def left_out(self, device: torch.device) -> Tensor | None:
        """Return what a window from the start leaves out, ``[S_q, S_k]``: made once. No operator is told of it else."""
        if not self.band.from_start or self.band[:2] == CAUSAL[:2]:
            return None
        if device not in self._left_out:
            with unseen():
                longest = (max(lengths) for lengths in zip(*self.sequences.lengths()))
                self._left_out[device] = outside(self.band, *longest, device)
        return self._left_out[device]


def _moved(places: Tensor | None, device: torch.device) -> Tensor | None:
    if places is None or device.type == "cpu":
        return places
    return places.pin_memory().to(device, non_blocking=True)
