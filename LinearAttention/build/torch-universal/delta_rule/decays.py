"""Decays between the tokens of a chunk, made of sums of their logarithms g, and the gradient of g.

Where a token has no part in another one, the sum becomes minus infinity before ``exp`` is taken.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.chunk_layout import CHUNK, num_chunks, stack_heads, unstack_heads
from ..utils.packed_sequences import SequenceMasks


class LogDecays(NamedTuple):
    """Holds the logarithms of the decays of tokens in chunks; G is 1, or the size of a key.

    Attributes:
        g: ``[M, C, G]`` in float32.
        masks: of packed sequences, None where rows are one sequence.
    """

    g: Tensor
    masks: SequenceMasks | None


class Decays(NamedTuple):
    """Holds the decays between a token and the start or the end of its chunk.

    Attributes:
        from_start: from the start of the chunk to the token, ``[M, C, G]``.
        to_end: from the token to the end of the chunk, ``[M, C, G]``.
        chunk_decay: over the whole chunk, ``[M, G]``.
    """

    from_start: Tensor
    to_end: Tensor
    chunk_decay: Tensor


class DecayedKeys(NamedTuple):
    """Holds keys with the decays between them and the start or the end of their chunk.

    Attributes:
        key: keys times ``from_start`` where that is None; otherwise the keys alone, ``[M / heads_per_key, C, K]``.
        from_start: the decays from the start of the chunk, where one serves all channels, ``[M, C, 1]``; else None.
        k_beta_to_end: keys times β and the decays to the end of the chunk, ``[M, C, K]``.
        chunk_decay: ``[M, G]``.
    """

    key: Tensor
    from_start: Tensor | None
    k_beta_to_end: Tensor
    chunk_decay: Tensor

    def k_cumdecay(self, ut_inverse: Tensor, heads_per_key: int) -> Tensor:
        """Compute the product of the inverse and keys with the decays from the start, ``[M, C, K]``."""
        if self.from_start is not None:
            ut_inverse = ut_inverse * self.from_start.transpose(-1, -2)
        return unstack_heads(torch.bmm(stack_heads(ut_inverse, heads_per_key), self.key), heads_per_key)


class ProductGradients(NamedTuple):
    """Holds the gradients of the products within chunks, but for their factor β, which is that of a column.

    Attributes:
        neg_kk: of ``-KKᵀ⊙Γ``, ``[M, C, C]``; what is not below the diagonal is to be left out.
        qk: of ``QKᵀ⊙Γ``, ``[M, C, C]``.
        log_decay: of the logarithms of Γ, ``[M, C, C]``, zero on the diagonal.
        column_sums: the sums of ``log_decay`` over rows, ``[M, C, 1]``.
    """

    neg_kk: Tensor
    qk: Tensor
    log_decay: Tensor
    column_sums: Tensor


class DecayedGradients(NamedTuple):
    """Holds the gradients of what meets the states around a chunk, ``[M, C, K]``.

    Attributes:
        query: of queries times the decays from the start of the chunk.
        neg_key: of minus the keys times these decays.
        k_beta_to_end: of keys times β and the decays to the end of the chunk.
    """

    query: Tensor
    neg_key: Tensor
    k_beta_to_end: Tensor


class ChunkGradients(NamedTuple):
    """Holds the gradients of tokens in chunks.

    Attributes:
        query, key: ``[M / heads_per_key, C, K]``.
        cumsum: of the sums of g from the start of the chunk, ``[M, C, G]``, but for what ``to_end`` has.
        beta: that part of the gradient of β that comes through the state behind the chunk, ``[M, C, 1]``.
        to_end: the gradients of the logarithms of the decays to the end of the chunk, ``[M, C, G]``.
    """

    query: Tensor
    key: Tensor
    cumsum: Tensor
    beta: Tensor
    to_end: Tensor


def chunk_local_cumsum(log_decays: LogDecays) -> Tensor:
    """Sum g from the start of the chunk, or of a sequence in it, ``[M, C, G]``.

    In packed rows the sums start again with a sequence: differences of sums over others would lose digits.
    """
    g, masks = log_decays
    if masks is None:
        return g.cumsum(1)
    same = masks.same_sequence
    by_row = g.unflatten(0, (*same.shape[:2], -1)).transpose(2, 3)
    sums = torch.bmm(same.flatten(0, 1).float(), by_row.flatten(3).flatten(0, 1)).view(by_row.shape)
    return sums.transpose(2, 3).flatten(0, 2)


def g_gradient(to_end: Tensor, cumsum: Tensor, masks: SequenceMasks | None, batch: int, length: int) -> Tensor:
    """Compute the gradient of g, ``[B, T, H, G]``.

    The g of a token has part in its own sum and in those of later tokens, and in the decays of earlier tokens to the
    end of the chunk. The latter could be had from sums too: the gradient of the last sum, less those of later tokens.
    But the last tokens of a chunk decay least on the way to its end and have the largest of these gradients, which no
    g has part in: subtracted again, they would leave little of the digits of the others.

    Args:
        to_end: the gradients of the logarithms of the decays to the ends of chunks, ``[N * B * H, C, G]``.
        cumsum: the gradients of the sums of g but for that, likewise.
        masks: of packed sequences, None where rows are one sequence.
        batch: B.
        length: T.
    """
    by_row = (x.unflatten(0, (num_chunks(length), batch, -1)).transpose(2, 3) for x in (to_end, cumsum))
    both = torch.cat(list(by_row), 2)  # [N, B, 2 C, H, G]
    if masks is None:
        same = torch.ones(1, CHUNK, CHUNK, dtype=both.dtype, device=both.device).tril()
    else:
        same = masks.same_sequence.flatten(0, 1).float()
    earlier_and_later = torch.cat([same.tril(-1), same.transpose(-1, -2)], 2).expand(both.shape[:2].numel(), -1, -1)
    d_g = torch.bmm(earlier_and_later, both.flatten(3).flatten(0, 1))
    return d_g.view(both.shape[0], batch, CHUNK, *both.shape[3:]).transpose(0, 1).flatten(1, 2)[:, :length]


def chunk_decays(log_decays: LogDecays) -> Decays:
    """Compute the decays between tokens and the start and the end of their chunk."""
    sums, masks = chunk_local_cumsum(log_decays), log_decays.masks
    from_start, to_end = sums, sums[:, -1:] - sums
    if masks is not None:
        from_start = _mask_out(from_start, ~masks.reads_state)
        to_end = _mask_out(to_end, ~masks.writes_state)
    from_start = from_start.exp()
    return Decays(from_start, to_end.exp(), from_start[:, -1])


def row_dots(left: Tensor, right: Tensor, heads_per_key: int = 1) -> Tensor:
    """Compute ``Σ_d left_id right_id``, ``[M, C, 1]``: the diagonal of a product of matrices.

    That product reads both once; the product of elements would be written, and read again to be summed.

    Args:
        left: ``[M, C, D]``.
        right: ``[M / heads_per_key, C, D]``.
        heads_per_key: how many chunks on the left are multiplied with one on the right.
    """
    products = unstack_heads(torch.bmm(stack_heads(left, heads_per_key), right.transpose(-1, -2)), heads_per_key)
    return products.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)


def _mask_out(log_decay: Tensor, mask: Tensor) -> Tensor:
    by_row = log_decay.unflatten(0, (*mask.shape[:2], -1))
    return by_row.masked_fill(mask, float("-inf")).flatten(0, 2)
