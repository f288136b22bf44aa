"""A description of the mask of a forward, shared by all layers: what one of them computes or reads serves all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .._common.captures import capturing
from .._common.checkpoints import unseen_by_checkpoints
from ..attention_spec import CAUSAL, FULL, Band, SequenceEnds
from ..varlen.cu_seqlens import cross_sequence_mask
from ..varlen.host_values import HostValues
from ..varlen.varlen_batch import VarlenBatch
from .mask_functions import MaskStructure

_BOOLEAN_MASK = (False, None)  # the key in `_masks` of the tensor that code of others gets, and may write to


class MaskDescription:
    """Describes which keys each query of a forward sees.

    To the models of transformers it behaves like the mask that it describes, bool ``[B, 1, S_q, S_k]``, True where a
    query sees a key: that tensor answers for its attributes, items, operators and torch functions. If somebody writes
    to the tensor, the tensor replaces the description.

    Args:
        queries: the number of queries of each batch index.
        keys: the number of keys, likewise.
        structure: the bands, sequences and chunks of the mask function; None if it is more than these.
        padding: ``[B, keys]``, False where a key is padding; None without padding.
        make: computes the mask of the queries from one index up to another.
        defers_to_is_causal: whether the module's ``is_causal`` counts in place of a causal or full mask, as where
            transformers would pass none.
    """

    def __init__(
        self,
        queries: int,
        keys: int,
        structure: MaskStructure | None,
        padding: Tensor | None,
        make: Callable[[int, int], Tensor],
        defers_to_is_causal: bool = False,
    ) -> None:
        self.queries, self.keys, self.structure = queries, keys, structure
        self.defers_to_is_causal = defers_to_is_causal
        self._make = make
        self._masks: dict[tuple[bool, torch.device | None], Tensor] = {}  # by whether True means masked out
        self._mask_version = 0  # of the tensor that others may write to
        self._across_sequences: tuple[Tensor, Tensor, Tensor] | None = None
        self._cache: dict[Hashable, Any] = {}
        self._padding = None if padding is None else HostValues(padding)
        ids = None if structure is None else structure.sequence_ids
        self._sequence_ids = None if ids is None else HostValues(ids)

    def band_or_varlen(self, batch: int) -> Band | VarlenBatch | None:
        """Return a band or packed sequences that say the same without a mask; None where only a mask does.

        The host reads padding and sequences at the first call for a batch size. While a graph is compiled it cannot,
        and the answer is None for them.
        """
        if torch.compiler.is_compiling():
            return self._resolve(batch)
        return self.cached(("band or sequences", batch), lambda: self._resolve(batch))

    def is_band_within_sequences(self) -> bool:
        """Tell whether the mask is a band within sequences: no padding, no chunks."""
        self._reset_if_written()
        structure = self.structure
        return structure is not None and self._padding is None and structure.chunk is None

    def fits(self, queries: int, keys: int) -> bool:
        """Tell whether the mask is for so many queries and keys. A layer's cache may be shorter than the mask."""
        return queries == self.queries and (keys <= self.keys or self.queries == self.keys == 1)

    def sdpa_mask(self, batch: int) -> Tensor | None:
        """Return the mask that transformers' sdpa gets for a batch size; None where ``is_causal`` counts instead."""
        is_left_to_module = self.defers_to_is_causal and self.band_or_varlen(batch) in (CAUSAL, FULL)
        if is_left_to_module and (self.queries in (1, self.keys) or self.structure.band == FULL):
            return None
        return self.mask()

    def mask(self, device: torch.device | None = None) -> Tensor:
        """Return the mask, bool ``[B, 1, S_q, S_k]``, True where a query sees a key; computed once for each device."""
        return self._cached_mask(False, device)

    def is_causal(self, queries: int, keys: int) -> bool:
        """Tell whether the mask is plainly causal for so many queries and keys.

        With padding the answer needs a read of the host, which there is for the whole prompt and outside of graphs
        alone: elsewhere it is False.
        """
        self._reset_if_written()
        structure = self.structure
        if structure is None or structure.band != CAUSAL or structure.chunk is not None or self._sequence_ids:
            return False
        if (queries, keys) != (self.queries, self.keys) or self._padding is None:
            return (queries, keys) == (self.queries, self.keys)
        return not capturing() and self.band_or_varlen(len(self._padding.tensor)) == CAUSAL

    def visible_keys(self, queries: int, keys: int) -> int:
        """Return how many of so many keys the first ``queries`` queries see at most: none of them sees a later key."""
        self._reset_if_written()
        if self.structure is None or self.structure.band.right is None:
            return keys
        band = self.structure.band
        return max(0, min(keys, queries + band.shift(self.queries, self.keys) + band.right))

    def mask_slice(self, begin: int, end: int) -> Tensor:
        """Return the mask of some queries, ``[B, 1, end - begin, S_k]``, without computing the whole mask."""
        self._reset_if_written()
        if end - begin == self.queries or _BOOLEAN_MASK in self._masks:
            return self.mask()[:, :, begin:end]
        return self._make(begin, end)

    def slice_queries(self, begin: int, end: int) -> MaskDescription | None:
        """Describe the mask of some queries and the keys up to the last query; None where they may see later keys."""
        self._reset_if_written()
        structure, keys = self.structure, self.keys - self.queries + end
        if structure is None or structure.chunk is not None or structure.band.right != 0 or structure.band.upper_left:
            return None
        padding = None if self._padding is None else self._padding.tensor[:, :keys]
        if padding is not None and self.is_causal(self.queries, self.keys):
            padding = None
        make = lambda first, last: self.mask_slice(begin + first, begin + last)[..., :keys]  # noqa: E731
        return MaskDescription(end - begin, keys, structure, padding, make)

    def masked_out(self, device: torch.device) -> Tensor:
        """Return the inverted mask, True where a key is masked out; computed once for each device."""
        return self._cached_mask(True, device)

    def masked_out_across_sequences(
        self, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, batch: int, device: torch.device
    ) -> Tensor:
        """Return ``masked_out`` with the keys of other sequences too; computed once for the same ``cu_seqlens``."""
        known = self._across_sequences
        if known is None or known[0] is not cu_seqlens_q or known[1] is not cu_seqlens_k or known[2].device != device:
            with unseen_by_checkpoints():
                others = cross_sequence_mask(batch, self.queries, self.keys, cu_seqlens_q, cu_seqlens_k, device)
                known = self._across_sequences = cu_seqlens_q, cu_seqlens_k, self.masked_out(device) | others
        return known[2]

    def cached(self, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Return what a function computes from the mask, once for each key."""
        self._reset_if_written()
        if key not in self._cache:
            with unseen_by_checkpoints(), torch.inference_mode(False):
                self._cache[key] = compute()
        return self._cache[key]

    def to(self, *_: Any, **__: Any) -> MaskDescription:
        """Return the description itself: each layer names its device when it needs a mask."""
        return self

    def _cached_mask(self, masked_out: bool, device: torch.device | None) -> Tensor:
        self._reset_if_written()
        found = self._masks.get((masked_out, device))
        if found is None:
            # a tensor that is made in inference mode has no version to tell of writes
            with unseen_by_checkpoints(), torch.inference_mode(False):
                found = self._masks[masked_out, device] = self._compute_mask(masked_out, device)
            if (masked_out, device) == _BOOLEAN_MASK:
                self._mask_version = found._version
        return found

    def _reset_if_written(self) -> None:
        """Drop the description if somebody wrote to its mask, which replaces it. A graph cannot tell."""
        mask = None if torch.compiler.is_compiling() else self._masks.get(_BOOLEAN_MASK)
        if mask is not None and mask._version != self._mask_version:
            self.structure, self._mask_version = None, mask._version
            self._masks, self._across_sequences, self._cache = {_BOOLEAN_MASK: mask}, None, {}

    def _compute_mask(self, masked_out: bool, device: torch.device | None) -> Tensor:
        if masked_out:
            return self.mask(device).logical_not()
        return self._make(0, self.queries) if device is None else self.mask().to(device)

    def _resolve(self, batch: int) -> Band | VarlenBatch | None:
        """Compute what :meth:`band_or_varlen` remembers."""
        structure = self.structure
        if structure is None:
            return None
        band = structure.band.within(self.queries, self.keys)
        if structure.chunk is not None:
            return self._chunks_as_sequences(batch, band, structure.chunk)
        if self._padding is None and self._sequence_ids is None:
            return band
        if self._padding and self._sequence_ids:
            return None
        if self._padding and len(self._padding.tensor) != batch:  # padding of batch size 1 holds for the whole batch
            return None
        read = self._padding or self._sequence_ids
        if isinstance(read.tensor, FakeTensor) or torch.compiler.is_compiling():
            return None
        if self.queries != self.keys and (self._sequence_ids or self.queries == 1 or band != FULL):
            return None  # the mask of one query is small, and the host would read lengths in each step of decoding
        return self._without_padding(band) if self._padding else self._packed_sequences(batch, band)

    def _chunks_as_sequences(self, batch: int, band: Band, chunk: int) -> VarlenBatch | None:
        """Return chunks of causal attention as packed sequences; with a window they need a mask."""
        if band != CAUSAL:
            return None
        ends = [*range(chunk, self.keys, chunk), self.keys]
        return self._varlen_batch([index * self.keys + end for index in range(batch) for end in ends])

    def _packed_sequences(self, batch: int, band: Band) -> Band | VarlenBatch:
        """Return the sequences of ``sequence_ids``; the band alone where there is one for each batch index."""
        sequence_ids = self._sequence_ids.values
        begins = torch.ones_like(sequence_ids, dtype=torch.bool)
        begins[:, 1:] = sequence_ids[:, 1:] != sequence_ids[:, :-1]
        begins = begins.expand(batch, -1)
        if begins.sum() == batch:
            return band
        return self._varlen_batch([*begins.flatten().nonzero().flatten().tolist()[1:], begins.numel()])

    def _varlen_batch(self, ends: list[int]) -> VarlenBatch:
        return VarlenBatch(SequenceEnds(tuple(ends), tuple(ends)), self.structure.band)

    def _without_padding(self, band: Band) -> Band | VarlenBatch | None:
        """Return the batch without padding keys, and without queries that see no key; None where only a mask can.

        With right padding, ``k k k p p``, a causal query of a token sees the keys up to its own, and the two behind
        them see all three keys: a band of five queries and three keys in the upper left corner. With left padding,
        ``p p k k k``, the first two queries see no key. Padding between keys needs a mask, and so does left padding
        with a band that is not causal.
        """
        is_token = self._padding.values.bool()
        counts = is_token.sum(-1)
        if bool(is_token.all()):
            return band
        first = torch.zeros_like(counts)
        last = torch.where(counts > 0, self.queries, 0)
        if band != FULL:
            first, positions = is_token.int().argmax(-1), torch.arange(self.keys, device="cpu")
            behind = first + counts
            is_contiguous = (is_token == ((positions >= first[:, None]) & (positions < behind[:, None]))).all()
            if not is_contiguous or (band.right != 0 and first.any()):
                return None
            last = last if band.left is None else last.minimum(behind + band.left)
        lengths = last - first
        if band != FULL and not torch.equal(lengths, counts):
            band = band._replace(upper_left=True)
        positions = torch.arange(self.queries, device="cpu")
        queries = (positions >= first[:, None]) & (positions < last[:, None])
        ends = (tuple(numbers.cumsum(0).tolist()) for numbers in (lengths, counts))
        keys = is_token.flatten().nonzero().flatten()
        if torch.equal(queries, is_token):
            return VarlenBatch(SequenceEnds(*ends), band, keys, keys)
        query_indices = None if bool(queries.all()) else queries.flatten().nonzero().flatten()
        return VarlenBatch(SequenceEnds(*ends), band, query_indices, keys)

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


def _delegate_to_mask(name: str) -> Callable:
    """Return an operator that the mask computes. Python looks for operators in the class, not in ``__getattr__``."""

    def operator(self: MaskDescription, *others: Any) -> Any:
        others = tuple(other.mask() if isinstance(other, MaskDescription) else other for other in others)
        return getattr(self.mask(), name)(*others)

    return operator


_ARITHMETIC = ("add", "sub", "mul", "truediv", "and", "or", "xor", "matmul")
_OTHERS = ("eq", "ne", "lt", "le", "gt", "ge", "neg", "invert", "len", "iter", "contains")
for _name in (*_ARITHMETIC, *(f"r{name}" for name in _ARITHMETIC), *_OTHERS):
    setattr(MaskDescription, f"__{_name}__", _delegate_to_mask(f"__{_name}__"))
MaskDescription.__hash__ = object.__hash__  # by identity, like a tensor's: == compares elements
