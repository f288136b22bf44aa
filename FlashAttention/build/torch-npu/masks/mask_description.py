"""The mask of a forward as a description, which all layers share: what is made or read for one of them serves all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .._common.captures import capturing
from ..attention_spec import CAUSAL, FULL, Band, Sequences
from ..selective_checkpoints import unseen
from ..varlen.cu_seqlens import HostValues, in_other_sequences
from ..varlen.varlen_batch import Packing
from .mask_functions import Pattern

_MASK = (False, None)  # of all masks of a description the one that others get


class MaskDescription:
    """Says which keys each query of a forward sees.

    Where transformers' models treat it as the mask ``[B, 1, S_q, S_k]`` that it describes, it is one: its attributes,
    items and torch's functions of it are those of that tensor, which is True where a query sees a key. Once somebody
    has written into that, it is what counts.

    Args:
        queries: how many there are in a sequence of the batch.
        keys: likewise.
        pattern: what the mask function says, None where it is none of the plain ones.
        padding: ``[B, keys]``, True where a key is not padding; None where there is none.
        make: makes the mask of some queries, from one on up to another.
        is_of_module: whether a module says itself if it is causal, where nothing but that is described.
    """

    def __init__(
        self,
        queries: int,
        keys: int,
        pattern: Pattern | None,
        padding: Tensor | None,
        make: Callable[[int, int], Tensor],
        is_of_module: bool = False,
    ) -> None:
        self.queries, self.keys, self.pattern, self.is_of_module = queries, keys, pattern, is_of_module
        self._make = make
        self._masks: dict[tuple[bool, torch.device | None], Tensor] = {}
        self._version = 0  # of the mask that others may have written into
        self._chosen: dict[int, Band | Packing | None] = {}
        self._beside: tuple[Tensor, Tensor, Tensor] | None = None
        self._made: dict[Hashable, Any] = {}
        self._padding = None if padding is None else HostValues(padding)
        self._ids = None if pattern is None or pattern.ids is None else HostValues(pattern.ids)

    def plain(self, batch: int) -> Band | Packing | None:
        """Return the description without a mask, for so many sequences; None where there is none.

        Reads lengths from the device when it is asked for the first time for so many; a graph, which cannot, gets the
        mask for them.
        """
        if torch.compiler.is_compiling():
            return self._choose(batch)
        self._look_for_changes()
        if batch not in self._chosen:
            with unseen():
                self._chosen[batch] = self._choose(batch)
        return self._chosen[batch]

    def is_band(self) -> bool:
        """Tell whether it says nothing but distances, beside which tokens are packed together."""
        self._look_for_changes()
        pattern = self.pattern
        return pattern is not None and self._padding is None and pattern.chunk is None

    def fits(self, queries: int, keys: int) -> bool:
        """Tell whether it is for so many queries and keys; a layer's cache can be shorter than what it was made for."""
        return queries == self.queries and (keys <= self.keys or self.queries == self.keys == 1)

    def original(self, batch: int) -> Tensor | None:
        """Return what transformers' sdpa gets in its place, for so many sequences: None where the module decides."""
        is_left_to_module = self.is_of_module and self.plain(batch) in (CAUSAL, FULL)
        if is_left_to_module and (self.queries in (1, self.keys) or self.pattern.band == FULL):
            return None
        return self.mask()

    def mask(self, device: torch.device | None = None) -> Tensor:
        """Return the mask, ``[B, 1, S_q, S_k]``, True where a query sees a key. It is made once."""
        return self._kept(False, device)

    def is_causal(self, queries: int, keys: int) -> bool:
        """Tell whether of so many queries and keys each sees all up to its own.

        Where somebody said what is padding, that is asked of prompts alone, outside of graphs: the host reads it.
        """
        self._look_for_changes()
        pattern = self.pattern
        if pattern is None or pattern.band != CAUSAL or pattern.ids is not None or pattern.chunk is not None:
            return False
        if (queries, keys) != (self.queries, self.keys) or self._padding is None:
            return (queries, keys) == (self.queries, self.keys)
        return not capturing() and self.plain(len(self._padding.tensor)) == CAUSAL

    def reach(self, queries: int, keys: int) -> int:
        """Return up to which of so many keys the first queries see at most."""
        self._look_for_changes()
        if self.pattern is None or self.pattern.band.right is None:
            return keys
        return max(0, min(keys, queries + self.pattern.band.shift(self.queries, self.keys) + self.pattern.band.right))

    def of_queries(self, begin: int, end: int) -> Tensor:
        """Return the mask of some queries, ``[B, 1, end - begin, S_k]``: for these the whole is not made."""
        self._look_for_changes()
        if end - begin == self.queries or _MASK in self._masks:
            return self.mask()[:, :, begin:end]
        return self._make(begin, end)

    def part(self, begin: int, end: int) -> MaskDescription | None:
        """Describe some queries among the keys up to that of the last one; None where they may see others."""
        self._look_for_changes()
        pattern, keys = self.pattern, self.keys - self.queries + end
        if pattern is None or pattern.chunk is not None or pattern.band.right != 0 or pattern.band.from_start:
            return None
        padding = None if self._padding is None else self._padding.tensor[:, :keys]
        if padding is not None and self.is_causal(self.queries, self.keys):
            padding = None
        make = lambda first, last: self.of_queries(begin + first, begin + last)[..., :keys]  # noqa: E731
        return MaskDescription(end - begin, keys, pattern, padding, make)

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

    def made(self, name: Hashable, make: Callable[[], Any]) -> Any:
        """Return what is made of the mask under a name. It is made once."""
        self._look_for_changes()
        if name not in self._made:
            with unseen(), torch.inference_mode(False):
                self._made[name] = make()
        return self._made[name]

    def to(self, *_: Any, **__: Any) -> MaskDescription:
        """Return the same: each layer asks for what it needs on its device."""
        return self

    def _kept(self, left_out: bool, device: torch.device | None) -> Tensor:
        self._look_for_changes()
        found = self._masks.get((left_out, device))
        if found is None:
            with unseen(), torch.inference_mode(False):  # what is made in inference mode tells of no changes
                found = self._masks[left_out, device] = self._computed(left_out, device)
            if (left_out, device) == _MASK:
                self._version = found._version
        return found

    def _look_for_changes(self) -> None:
        """Describe nothing but the mask itself from when somebody has written into it; a graph cannot ask."""
        mask = None if torch.compiler.is_compiling() else self._masks.get(_MASK)
        if mask is not None and mask._version != self._version:
            self.pattern, self._version = None, mask._version
            self._masks, self._chosen, self._beside, self._made = {_MASK: mask}, {}, None, {}

    def _computed(self, left_out: bool, device: torch.device | None) -> Tensor:
        if left_out:
            return self.mask(device).logical_not()
        return self._make(0, self.queries) if device is None else self.mask().to(device)

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
        if isinstance(read.tensor, FakeTensor) or torch.compiler.is_compiling() or (self._padding and self._ids):
            return None
        if self.queries != self.keys and (self._ids or self.queries == 1 or band != FULL):
            return None  # a mask of one query is small, and its lengths would be read in each step of decoding
        return self._padded(band) if self._padding else self._packed(batch, band)

    def _chunks(self, batch: int, band: Band, chunk: int) -> Packing | None:
        """Return the chunks as sequences; beside windows there has to be a mask."""
        if band != CAUSAL:
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

    def _packing(self, ends: list[int]) -> Packing:
        return Packing(Sequences(tuple(ends), tuple(ends)), self.pattern.band)

    def _padded(self, band: Band) -> Band | Packing | None:
        """Return a batch without the keys that are padding, each with the queries that see another one.

        Of ``k k k p p`` a causal query sees the first keys up to its own, and those behind them all three: the band
        begins at the first query. Of ``p p k k k`` the first queries see none. None where a band sees less than that:
        with padding between its keys, or in both directions and padding before them.
        """
        kept = self._padding.values.bool()
        counts = kept.sum(-1)
        if bool(kept.all()):
            return band
        first = torch.zeros_like(counts)
        last = torch.where(counts > 0, self.queries, 0)
        if band != FULL:
            first, places = kept.int().argmax(-1), torch.arange(self.keys, device="cpu")
            behind = first + counts
            is_whole = (kept == ((places >= first[:, None]) & (places < behind[:, None]))).all()
            if not is_whole or (band.right != 0 and first.any()):
                return None
            last = last if band.left is None else last.minimum(behind + band.left)
        lengths = last - first
        if band != FULL and not torch.equal(lengths, counts):
            band = band._replace(from_start=True)
        places = torch.arange(self.queries, device="cpu")
        queries = (places >= first[:, None]) & (places < last[:, None])
        ends = (tuple(numbers.cumsum(0).tolist()) for numbers in (lengths, counts))
        keys = kept.flatten().nonzero().flatten()
        if torch.equal(queries, kept):
            return Packing(Sequences(*ends), band, keys, keys)
        chosen = None if bool(queries.all()) else queries.flatten().nonzero().flatten()
        return Packing(Sequences(*ends), band, chosen, keys)

    # ---- as a tensor ------------------------------------------------------------------------------------------------
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.mask(), name)

    def __getitem__(self, key: Any) -> Tensor:
        return self.mask()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.mask()[key] = value

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
_OTHERS = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "len", "iter", "contains")
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_OTHERS):
    setattr(MaskDescription, f"__{_name}__", _of_the_mask(f"__{_name}__"))
MaskDescription.__hash__ = object.__hash__  # as a tensor's, whose == is no comparison of objects either
