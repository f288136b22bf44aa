"""Packed sequences that are made of a batch with padding, or of a batch whose sequences hold several documents."""

from __future__ import annotations

import torch
from torch import Tensor

from .._common.checkpoints import unseen_by_checkpoints
from ..attention_spec import CAUSAL, Band, SequenceEnds
from ..ops.reference import masked_out_by_band


class VarlenBatch:
    """Describes a batch ``[B, S]`` as packed sequences.

    Args:
        sequences: where they end among the tokens that are packed.
        band: which keys of its sequence a query sees.
        queries: the indices in ``[B · S_q]`` of the queries that are packed, on the CPU; None for all.
        keys: the indices in ``[B · S_k]`` of the keys that are packed, likewise.
    """

    def __init__(
        self, sequences: SequenceEnds, band: Band, queries: Tensor | None = None, keys: Tensor | None = None
    ) -> None:
        self.sequences, self.band = sequences, band
        self._host_indices = queries, keys
        self._device_indices: dict[torch.device, tuple[Tensor | None, ...]] = {}
        self._masked_out: dict[torch.device, Tensor | None] = {}
        self._layouts: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def token_indices(self, device: torch.device) -> tuple[Tensor | None, ...]:
        """Return the indices of queries and of keys on a device, to which they are copied once, without waiting."""
        if device not in self._device_indices:
            with unseen_by_checkpoints():
                queries, keys = self._host_indices
                on_device = _copy_to(keys, device)
                self._device_indices[device] = (
                    on_device if queries is keys else _copy_to(queries, device),
                    on_device,
                )
        return self._device_indices[device]

    def is_self_attention(self) -> bool:
        """Tell whether the packed queries are the same tokens as the packed keys, in the same sequences."""
        return self.sequences.ends == self.sequences.key_ends and self._host_indices[0] is self._host_indices[1]

    def token_layout(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return where packed tokens are in the batch, where their sequences end, and where that of each begins.

        Returns:
            int64 ``[T]``, indices in ``[B · S]``; int32 ``[sequences]``, ends among the packed tokens; int64 ``[T]``,
            the index in ``[B · S]`` of the first token of a token's sequence. They are copied once, without waiting.
        """
        if device not in self._layouts:
            with unseen_by_checkpoints():
                ends = torch.tensor(self.sequences.ends, device="cpu")
                lengths = torch.diff(ends, prepend=ends.new_zeros(1))
                queries, _ = self._host_indices
                indices = torch.arange(int(ends[-1]), device="cpu") if queries is None else queries
                begins = indices[(ends - lengths).clamp(max=len(indices) - 1)].repeat_interleave(lengths)
                self._layouts[device] = tuple(_copy_to(each, device) for each in (indices, ends.int(), begins))
        return self._layouts[device]

    def masked_out(self, device: torch.device) -> Tensor | None:
        """Return a band as a mask, bool ``[S_q, S_k]`` of the longest sequence, made once for each device.

        It is None where operators have a mode for the band: they have none for a window in the upper left corner.
        """
        if not self.band.upper_left or self.band[:2] == CAUSAL[:2]:
            return None
        if device not in self._masked_out:
            with unseen_by_checkpoints():
                self._masked_out[device] = masked_out_by_band(self.band, *self.sequences.longest(), device)
        return self._masked_out[device]


def _copy_to(indices: Tensor | None, device: torch.device) -> Tensor | None:
    if indices is None or device.type == "cpu":
        return indices
    return indices.pin_memory().to(device, non_blocking=True)
