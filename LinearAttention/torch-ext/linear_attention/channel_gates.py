"""Products of keys and queries within chunks where every channel of a head has a gate: Kimi delta attention.

``Σ_d a_id b_jd exp(sum_id - sum_jd)`` is no matrix product, and all its terms take C times the memory of a and b. But
``exp(sumᵢ - sumₘ) exp(sumₘ - sumⱼ)`` for a token m between j and i is one, and neither factor exceeds one. A chunk is
halved, and its halves are, down to single tokens: the pairs of one token of a second half and one of the first half
before it have the last token of that between them. These are six products of all second halves with all first ones, of
which each keeps its own pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .chunks import CHUNK
from .gates import Decays, Gates, Gradients, Led, OfLed, OfProducts, dots
from .transforms import is_transformed

if TYPE_CHECKING:
    from .segment import Chunks


_TILE = 16  # rows and columns of which the device makes its products


class _Halving(NamedTuple):
    """Holds what is known of one halving, into P pairs of halves of b tokens.

    Attributes:
        size: b.
        earlier: the decays from tokens of first halves to the ends of these, ``[M, P, b, K]``; the next halving writes
            over them.
        later: those from there to tokens of second halves, likewise.
        pairs: 1 where a second half is the one behind a first half, ``[P, 1, 1, P, 1]``.
    """

    size: int
    earlier: Tensor
    later: Tensor
    pairs: Tensor

    def first(self, x: Tensor) -> Tensor:
        """View the first halves of ``[M, C, ...]``: ``[M, P, b, ...]``."""
        return x.unflatten(1, (-1, 2, self.size))[:, :, 0]

    def second(self, x: Tensor) -> Tensor:
        """View the second halves of ``[M, C, ...]``: ``[M, P, b, ...]``."""
        return x.unflatten(1, (-1, 2, self.size))[:, :, 1]

    def between(self, x: Tensor) -> Tensor:
        """View the rows of second halves and columns of first ones in ``[M, C, 2, C]``: ``[M, P, b, 2, P, b]``."""
        return self.second(x).unflatten(4, (-1, 2, self.size))[:, :, :, :, :, 0]


def products(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor, Led]:
    """Compute ``Σ_d k_id k_jd Γ_ijd`` for j < i and ``Σ_d q_id k_jd Γ_ijd`` for j ≤ i, between no Γ and eQ.

    Keys and queries take in the decays of one halving after the other, until they have those of the whole chunk. The
    keys of the chunks are written over.
    """
    query, key = chunks.query, chunks.key
    of_keys, of_queries = (key[:, 0, 0].new_zeros(len(key), CHUNK, CHUNK) for _ in range(2))
    of_queries.diagonal(dim1=-2, dim2=-1).copy_(dots(query, key).squeeze(-1))
    whole = _first_decays(chunks.gates)  # of halves, and of tokens at first
    later_key, later_query, earlier = key * whole, query * whole, key
    size = 1
    while size < CHUNK:
        for x, found in ((later_key, of_keys), (later_query, of_queries)):
            _own_pairs(found, size).copy_(_products_of_halves(x, earlier, size))
        first, second = whole.unflatten(1, (-1, 2)).unbind(2)
        later_key, later_query = (_decayed(x, 1, first) for x in (later_key, later_query))
        earlier, whole = _decayed(earlier, 0, second), first * second
        size *= 2
    all_led = Led(later_key, None, earlier * chunks.beta, whole[:, 0])
    return key.new_empty(0), of_keys, of_queries, later_query, all_led


def led(chunks: Chunks, decays: Decays) -> Led:
    """Give keys the decays to the bounds of their chunk."""
    lead, trail, whole = decays
    return Led(chunks.key * lead, None, chunks.key * (trail * chunks.beta), whole)


def gradients_of_gates(chunks: Chunks, decays: Decays, of_products: OfProducts, _: Tensor, of_led: OfLed) -> Gradients:
    """Compute the gradients of queries, keys and sums of gates.

    A sum enters as that of a later token, or as that of an earlier one, so that its gradient is what the gradients of
    later tokens make with them, less what those of earlier ones do.

    Args:
        chunks: the tokens.
        decays: of them.
        of_products: the gradients of products.
        of_led: those of keys and queries with their decays; they are written over.
    """
    query, key, beta, (lead, trail, _) = chunks.query, chunks.key, chunks.beta, decays
    weights = _beside(of_products.keys, of_products.queries, beta.transpose(-1, -2))
    later = _beside(of_led.key, of_led.query, lead)  # that of keys with its sign changed
    earlier = torch.zeros(key.shape, dtype=key.dtype, device=key.device)
    for halving in _halvings(chunks.gates):
        if halving.size == 1:
            _add_neighbours(halving, query, key, weights, later, earlier)
            continue
        of_pairs = (halving.between(weights) * halving.pairs).flatten(1, 3).flatten(2)
        near = (halving.first(key) * halving.earlier).flatten(1, 2)
        far = _beside(halving.second(key), halving.second(query), halving.later, sign=-1)
        of_near = torch.bmm(of_pairs.transpose(-1, -2), far.flatten(1, 3))
        halving.second(later).addcmul_(torch.bmm(of_pairs, near).view(far.shape), halving.later.unsqueeze(3))
        halving.first(earlier).addcmul_(of_near.view(halving.earlier.shape), halving.earlier)
    later_key, later_query = later.unbind(2)
    sums = torch.addcmul(query * later_query, key, later_key + earlier, value=-1)
    alone = weights[:, :, 1].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # a token with itself: no gate has part in it
    trailed = of_led.trailed.mul_(trail)
    grad_key = earlier.sub_(later_key).addcmul_(query, alone).addcmul_(trailed, beta)
    kept = trailed.mul_(key)
    of_beta = kept.sum(-1, keepdim=True)
    grad_query = torch.addcmul(later_query, key, alone)
    return Gradients(grad_query, grad_key, sums, of_beta, kept.mul_(beta))


def _beside(keys: Tensor, queries: Tensor, weights: Tensor, sign: int = 1) -> Tensor:
    """Put ``sign * keys * weights`` beside ``queries * weights``: ``[..., 2, D]`` from ``[..., D]``."""
    if torch.compiler.is_compiling():  # which writes into nothing that is given
        return torch.stack([keys * weights * sign, queries * weights], -2)
    both = keys.new_empty(*keys.shape[:-1], 2, keys.shape[-1])
    torch.addcmul(keys.new_zeros(()), keys, weights, value=sign, out=both[..., 0, :])
    torch.mul(queries, weights, out=both[..., 1, :])
    return both


def _add_neighbours(
    halving: _Halving, query: Tensor, key: Tensor, weights: Tensor, later: Tensor, earlier: Tensor
) -> None:
    """Add what pairs of two single tokens make: a number weighs each, and no product of matrices is needed."""
    own = halving.between(weights).diagonal(dim1=1, dim2=4).movedim(-1, 1)  # [M, P, 1, 2, 1]
    near = halving.first(key) * halving.later
    halving.second(later).addcmul_(near.unsqueeze(3), own)
    of_first = (halving.second(query) * own[..., 1, :]).addcmul_(halving.second(key), own[..., 0, :], value=-1)
    halving.first(earlier).addcmul_(of_first, halving.later)


def _halvings(gates: Gates) -> Iterator[_Halving]:
    """Give all halvings of chunks, from that into single tokens to that into halves of the chunk.

    The decays to the ends of a pair are those to the ends of its halves, times what the other half decays by. Nothing
    is left of what comes before a sequence.
    """
    lead = _first_decays(gates)  # from the start of the half
    trail = torch.ones_like(lead)  # to the end of the half
    size = 1
    while size < CHUNK:
        (one, later), (earlier, _) = (x.unflatten(1, (-1, 2, size)).unbind(2) for x in (lead, trail))
        pairs = torch.eye(CHUNK // 2 // size, dtype=lead.dtype, device=lead.device)[:, None, None, :, None]
        yield _Halving(size, earlier, later, pairs)
        size *= 2
        if size < CHUNK:
            earlier.mul_(later[:, :, -1:])
            later.mul_(one[:, :, -1:])


def _first_decays(gates: Gates) -> Tensor:
    """Compute the decays of single tokens, ``[M, C, K]``; nothing is left of what comes before a sequence."""
    each = gates.each.exp()
    if gates.bounds is None:
        return each
    same, carried, _ = gates.bounds
    behind = same.diagonal(-1, dim1=-2, dim2=-1)[:, :, None, :, None]  # whether a token belongs to that before it
    first = ~torch.cat([carried[..., :1, :], behind], 3)
    return each.unflatten(0, (*same.shape[:2], -1)).masked_fill(first, 0).flatten(0, 2)


def _decayed(x: Tensor, half: int, factor: Tensor) -> Tensor:
    """Multiply the first or the second halves in ``[M, C, K]`` with ``[M, P, K]``, in place where that may be."""
    halves = x.unflatten(1, (factor.shape[1], 2, -1))
    if not is_transformed():
        halves[:, :, half].mul_(factor.unsqueeze(2))
        return x
    parts = list(halves.unbind(2))  # torch.func may need what would be written over
    parts[half] = parts[half] * factor.unsqueeze(2)
    return torch.stack(parts, 2).flatten(1, 3)


def _products_of_halves(later: Tensor, earlier: Tensor, size: int) -> Tensor:
    """Multiply the second halves of b tokens each in one tensor with the first halves before them in another one.

    Halves of less than a tile are multiplied with all of the tile, and what is not theirs is left.

    Returns:
        ``[M, b, b, P]``.
    """
    if size < _TILE:
        tiles = [x.unflatten(1, (-1, _TILE)).flatten(0, 1) for x in (later, earlier)]
        product = torch.bmm(tiles[0], tiles[1].transpose(-1, -2)).unflatten(0, (len(later), -1))
        own = product.unflatten(3, (-1, 2, size)).unflatten(2, (-1, 2, size))[:, :, :, 1, :, :, 0]
        return own.diagonal(dim1=2, dim2=4).permute(0, 2, 3, 1, 4).flatten(3)
    halves = (x.unflatten(1, (-1, 2, size))[:, :, half].flatten(0, 1) for half, x in ((1, later), (0, earlier)))
    left, right = halves
    return torch.bmm(left, right.transpose(-1, -2)).unflatten(0, (len(later), -1)).permute(0, 2, 3, 1)


def _own_pairs(x: Tensor, size: int) -> Tensor:
    """View what second halves have with the first halves before them in ``[M, C, C]``: ``[M, b, b, P]``."""
    return x.unflatten(2, (-1, 2, size)).unflatten(1, (-1, 2, size))[:, :, 1, :, :, 0].diagonal(dim1=1, dim2=3)
