"""Sums of gates within chunks, and the decays that follow from them. What has no decay is left out before ``exp``."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.chunk_layout import CHUNK, by_group, by_head, number
from ..utils.packed_sequences import Bounds


class Gates(NamedTuple):
    """Holds the gates of tokens in chunks; G is 1, or the size of a head.

    Attributes:
        each: logarithms of decays, ``[M, C, G]`` in float32.
        bounds: of packed sequences, None where rows are one sequence.
    """

    each: Tensor
    bounds: Bounds | None


class Decays(NamedTuple):
    """Holds the decays between a token and the bounds of its chunk.

    Attributes:
        lead: from the start of the chunk to the token, ``[M, C, G]``.
        trail: from the token to the end of the chunk, ``[M, C, G]``.
        whole: of the chunk, ``[M, G]``.
    """

    lead: Tensor
    trail: Tensor
    whole: Tensor


class Led(NamedTuple):
    """Holds keys with the decays between them and the bounds of their chunk.

    Attributes:
        key: eK, or K if ``lead`` is e by itself, ``[M / shared, C, K]``.
        lead: ``[M, C, 1]``; None with gates of channels.
        trailed: βlK, ``[M, C, K]``.
        whole: w, ``[M, G]``.
    """

    key: Tensor
    lead: Tensor | None
    trailed: Tensor
    whole: Tensor

    def read(self, inverse: Tensor, shared: int) -> Tensor:
        """Compute ``X (eK)``, ``[M, C, K]``."""
        if self.lead is not None:
            inverse = inverse * self.lead.transpose(-1, -2)
        return by_head(torch.bmm(by_group(inverse, shared), self.key), shared)


class OfProducts(NamedTuple):
    """Holds the gradients of products, ``[M, C, C]``, which β weighs behind them.

    Attributes:
        keys: of ``-KKᵀ⊙Γ``, of which only what is below the diagonal counts.
        queries: of ``QKᵀ⊙Γ``.
        pairs: of logarithms of Γ, zero on the diagonal.
        given: the sums of these over later tokens, ``[M, C, 1]``.
    """

    keys: Tensor
    queries: Tensor
    pairs: Tensor
    given: Tensor


class OfLed(NamedTuple):
    """Holds the gradients of eQ, of -eK and of βlK, ``[M, C, K]``."""

    query: Tensor
    key: Tensor
    trailed: Tensor


class Gradients(NamedTuple):
    """Holds the gradients of tokens in chunks.

    Attributes:
        query, key: ``[M / shared, C, K]``.
        sums: of sums of gates, ``[M, C, G]``, but for what tokens pass on to the end of their chunk.
        kept: of β, as far as keys are added to the state behind the chunk, ``[M, C, 1]``.
        passed: that, by the token that passes it on, ``[M, C, G]``.
    """

    query: Tensor
    key: Tensor
    sums: Tensor
    kept: Tensor
    passed: Tensor


def sums_of(gates: Gates) -> Tensor:
    """Sum gates from the start of the chunk, or of a sequence in it, ``[M, C, G]``.

    In packed rows the sums start again with a sequence: differences of sums over others would lose digits.
    """
    each, bounds = gates
    if bounds is None:
        return each.cumsum(1)
    by_row = each.unflatten(0, (*bounds.same.shape[:2], -1)).transpose(2, 3)
    sums = torch.bmm(bounds.same.flatten(0, 1).float(), by_row.flatten(3).flatten(0, 1)).view(by_row.shape)
    return sums.transpose(2, 3).flatten(0, 2)


def gate_gradients(passed: Tensor, sums: Tensor, bounds: Bounds | None, batch: int, length: int) -> Tensor:
    """Compute the gradients of gates, ``[B, T, H, G]``.

    The gate of a token has part in the sums of it and of later tokens, and in what tokens before it pass on. Taken as a
    gradient of sums the latter would be that of all tokens less that of later ones. The last token passes on most,
    through no gate: little would be left of the digits of the others.

    Args:
        passed: what tokens pass on to the ends of their chunks, ``[N * B * H, C, G]``.
        sums: the gradients of sums of gates but for that, likewise.
        bounds: of packed sequences, None where rows are one sequence.
        batch: B.
        length: T.
    """
    by_row = (x.unflatten(0, (number(length), batch, -1)).transpose(2, 3) for x in (passed, sums))
    both = torch.cat(list(by_row), 2)  # [N, B, 2 C, H, G]
    if bounds is None:
        same = torch.ones(1, CHUNK, CHUNK, dtype=both.dtype, device=both.device).tril()
    else:
        same = bounds.same.flatten(0, 1).float()
    before_and_behind = torch.cat([same.tril(-1), same.transpose(-1, -2)], 2).expand(both.shape[:2].numel(), -1, -1)
    found = torch.bmm(before_and_behind, both.flatten(3).flatten(0, 1))
    return found.view(both.shape[0], batch, CHUNK, *both.shape[3:]).transpose(0, 1).flatten(1, 2)[:, :length]


def decays(gates: Gates) -> Decays:
    """Compute the decays that sums of gates amount to."""
    sums, bounds = sums_of(gates), gates.bounds
    lead, trail = sums, sums[:, -1:] - sums
    if bounds is not None:
        lead, trail = (_cut_off(x, ~there) for x, there in ((lead, bounds.carried), (trail, bounds.kept)))
    lead = lead.exp()
    return Decays(lead, trail.exp(), lead[:, -1])


def dots(one: Tensor, other: Tensor, shared: int = 1) -> Tensor:
    """Compute the products of rows, ``[M, C, 1]`` from ``[M, C, D]``: of all rows, of which the diagonal is kept.

    A product of matrices reads both once; that of their elements would be written and read again.

    Args:
        one: the rows on the left.
        other: those on the right, ``[M / shared, C, D]``.
        shared: how many chunks on the left are multiplied with one on the right.
    """
    products = by_head(torch.bmm(by_group(one, shared), other.transpose(-1, -2)), shared)
    return products.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)


def _cut_off(x: Tensor, mask: Tensor) -> Tensor:
    by_row = x.unflatten(0, (*mask.shape[:2], -1))
    return by_row.masked_fill(mask, float("-inf")).flatten(0, 2)
