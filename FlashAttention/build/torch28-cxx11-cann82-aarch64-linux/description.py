"""The mask of a forward as a description, which all layers share: what is made or read for one of them serves all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .lengths import HostValues, in_other_sequences
from .options import CAUSAL, Band, Sequences
from .patterns import Pattern
from .selective_checkpoints import unseen


class Packing:
    """Says which tokens of a batch are in sequences of their own, one behind the other in memory.

    Attributes:
        sequences: where they end.
        band: which keys of its sequence a query sees.
    """

    def __init__(self, sequences: Sequences, band: Band, index: Tensor | None = None) -> None:
        self.sequences, self.band, self._index = sequences, band, index
        self._moved: dict[torch.device, Tensor] = {}

    def index(self, device: torch.device) -> Tensor | None:
        """Return which tokens of the batch they hold, by their places in ``[B · S]``; None for all.

        The index is moved to a device once, without waiting.
        """
        if self._index is None:
            return None
        if device not in self._moved:
            with unseen():
                pinned = self._index.pin_memory() if device.type != "cpu" else self._index
                self._moved[device] = pinned.to(device, non_blocking=True)
        return self._moved[device]


class MaskDescription:
    """Says which keys each query of a forward sees.

    Where transformers' models treat it as the mask ``[B, 1, S_q, S_k]`` that it describes, it is one: its attributes,
    items and torch's functions of it are those of that tensor, which is True where a query sees a key.

    Args:
        queries: how many there are in a sequence of the batch.
        keys: likewise.
        pattern: what the mask function says, None where it is none of the plain ones.
        padding: ``[B, keys]``, True where a key is not padding; None where there is none.
        make: makes the mask.
    """

    def __init__(
        self, queries: int, keys: int, pattern: Pattern | None, padding: Tensor | None, make: Callable[[], Tensor]
    ) -> None:
        self.queries, self.keys, self.pattern = queries, keys, pattern
        self._make = make
        self._masks: dict[tuple[bool, torch.device | None], Tensor] = {}
        self._chosen: dict[int, Band | Packing | None] = {}
        self._beside: tuple[Tensor, Tensor, Tensor] | None = None
        self._padding = None if padding is None else HostValues(padding)
        self._ids = None if pattern is None or pattern.ids is None else HostValues(pattern.ids)

    def plain(self, batch: int) -> Band | Packing | None:
        """Return the description without a mask, for so many sequences; None where there is none.

        Reads lengths from the device when it is asked for the first time for so many; a graph, which cannot, gets the
        mask for them.
        """
        if torch.compiler.is_compiling():
            return self._choose(batch)
        if batch not in self._chosen:
            with unseen():
                self._chosen[batch] = self._choose(batch)
        return self._chosen[batch]

    def is_band(self) -> bool:
        """Tell whether it says nothing but distances, beside which tokens are packed together."""
        pattern = self.pattern
        return pattern is not None and self._padding is None and pattern.chunk is None

    def mask(self, device: torch.device | None = None) -> Tensor:
        """Return the mask, ``[B, 1, S_q, S_k]``, True where a query sees a key. It is made once."""
        return self._kept(False, device)

    def left_out(self, device: torch.device) -> Tensor:
        """Return the mask the other way around, as the operators want it. It is made once a device."""
        return self._kept(True, device)

    def left_out_beside(self, cumulative: Tensor, key_cumulative: Tensor, batch: int, device: torch.device) -> Tensor:
        """Return `left_out` with what is in other sequences than a query. It is made once for these lengths."""
        known = self._beside
        if known is None or known[0] is not cumulative or known[1] is not key_cumulative or known[2].device != device:
            with unseen():
                others = in_other_sequences(batch, self.queries, self.keys, cumulative, key_cumulative, device)
                known = self._beside = cumulative, key_cumulative, self.left_out(device) | others
        return known[2]

    def to(self, *_: Any, **__: Any) -> MaskDescription:
        """Return the same: each layer asks for what it needs on its device."""
        return self

    def _kept(self, left_out: bool, device: torch.device | None) -> Tensor:
        found = self._masks.get((left_out, device))
        if found is None:
            with unseen():
                found = self._masks[left_out, device] = self._computed(left_out, device)
        return found

    def _computed(self, left_out: bool, device: torch.device | None) -> Tensor:
        if left_out:
            return self.mask(device).logical_not()
        return self._make() if device is None else self.mask().to(device)

    def _choose(self, batch: int) -> Band | Packing | None:
        pattern = self.pattern
        if pattern is None:
            return None
        band = pattern.band.within(self.queries, self.keys)
        if pattern.chunk is not None:
            return self._chunks(batch, band, pattern.chunk)
        if self._padding is None and self._ids is None:
            return band
        read = self._padding or self._ids
        if self._padding and len(self._padding.tensor) != batch:  # one row of padding can be that of all sequences
            return None
        is_unread = isinstance(read.tensor, FakeTensor) or torch.compiler.is_compiling()
        if self.queries != self.keys or is_unread or (self._padding and self._ids):
            return None
        return self._padded(band) if self._padding else self._packed(batch, band)

    def _chunks(self, batch: int, band: Band, chunk: int) -> Packing | None:
        """Return the chunks as sequences; beside windows and packed sequences there has to be a mask."""
        if self._ids or band != CAUSAL:
            return None
        within = [*range(chunk, self.keys, chunk), self.keys]
        return self._packing([row * self.keys + end for row in range(batch) for end in within])

    def _packed(self, batch: int, band: Band) -> Band | Packing:
        ids = self._ids.values
        begins = torch.ones_like(ids, dtype=torch.bool)
        begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
        begins = begins.expand(batch, -1)
        if begins.sum() == batch:
            return band
        return self._packing([*begins.flatten().nonzero().flatten().tolist()[1:], begins.numel()])

    def _padded(self, band: Band) -> Band | Packing | None:
        """Return the tokens that are no padding as sequences; None where there is padding between them.

        A causal pattern with padding behind the tokens only needs nothing: no token sees it.
        """
        kept = self._padding.values.bool()
        counts = kept.sum(-1)
        if bool(kept.all()):
            return band
        places = torch.arange(kept.shape[-1])
        behind = bool((kept == (places < counts.unsqueeze(-1))).all())
        if behind and band.right == 0:
            return band
        first = kept.int().argmax(-1, keepdim=True)
        whole = (kept == ((places >= first) & (places < first + counts.unsqueeze(-1)))).all()
        if not whole or not bool(counts.all()):
            return None
        return self._packing(counts.cumsum(0).tolist(), kept.flatten().nonzero().flatten())

    def _packing(self, ends: list[int], index: Tensor | None = None) -> Packing:
        return Packing(Sequences(tuple(ends), tuple(ends)), self.pattern.band, index)

    # ---- as a tensor ------------------------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.mask(), name)

    def __getitem__(self, key: Any) -> Tensor:
        return self.mask()[key]

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.mask, (args, kwargs or {}))
        return function(*args, **kwargs)


def _of_the_mask(name: str) -> Callable:
    """Return an operator of the mask: Python looks for those in the class."""

    def operator(self: MaskDescription, *others: Any) -> Any:
        others = tuple(other.mask() if isinstance(other, MaskDescription) else other for other in others)
        return getattr(self.mask(), name)(*others)

    return operator


_ARITHMETIC = ("add", "sub", "mul", "truediv", "and", "or", "xor", "matmul")
_COMPARED = ("eq", "ne", "lt", "le", "gt", "ge")
for _name in (
    *_ARITHMETIC,
    *(f"r{name}" for name in _ARITHMETIC),
    *_COMPARED,
    "neg",
    "invert",
    "len",
    "iter",
    "contains",
):
    setattr(MaskDescription, f"__{_name}__", _of_the_mask(f"__{_name}__"))
MaskDescription.__hash__ = object.__hash__  # as a tensor's, whose == is no comparison of objects either
