"""Products of keys and queries within chunks where every channel of a head has a gate: Kimi delta attention.

``Σ_d a_id b_jd exp(sum_id - sum_jd)`` is no matrix product, and all its terms take C times the memory of a and b. But
``exp(sumᵢ - sumₘ) exp(sumₘ - sumⱼ)`` for a token m between j and i is one, and neither factor exceeds one. A chunk is
halved, and its halves are, down to single tokens: the pairs of one token of a second half and one of the first half
before it have the last token of that between them. These are six products, each of whole tiles, of which the pairs of
one halving are kept.

Keys and queries stand beside each other, and whole tensors are multiplied where one half would do: what is strided is
copied before an operator, and behind one that writes to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..utils.chunk_layout import CHUNK
from .decays import Decays, Gates, Gradients, Led, OfLed, OfProducts, dots

if TYPE_CHECKING:
    from .chunk import Chunks


_TILE = 16  # rows and columns of which the device makes its products


class _Level(NamedTuple):
    """Holds keys and queries with their decays within halves of some tokens each.

    Attributes:
        size: the tokens of a half, b.
        later: keys and queries with the decays from the start of their half, ``[M, C, 2, K]``.
        earlier: keys with those to the end of their half, ``[M, C, K]``.
        whole: the decays over halves, ``[M, C / b, K]``.
    """

    size: int
    later: Tensor
    earlier: Tensor
    whole: Tensor

    def rows(self) -> Tensor:
        """View keys and queries by tiles, of which no pair of halves is in two, ``[M C / W, 2 W, K]``."""
        return self.later.flatten(1, 2).unflatten(1, (-1, 2 * self.tile)).flatten(0, 1)

    def columns(self) -> Tensor:
        """View earlier keys likewise, ``[M C / W, W, K]``."""
        return self.earlier.unflatten(1, (-1, self.tile)).flatten(0, 1)

    @property
    def tile(self) -> int:
        """The tokens of a tile, W."""
        return max(_TILE, 2 * self.size)


class _Carried(NamedTuple):
    """Holds what takes the decays of halves to those of pairs of halves.

    Attributes:
        later: 1 for tokens of first halves, and the decay over the first half for those of second ones,
            ``[M, P, 2, 1, 1, K]``.
        earlier: the decay over the second half for those of first halves, and 1, ``[M, P, 2, 1, K]``.
        whole: the decays over pairs, ``[M, P, K]``.
    """

    later: Tensor
    earlier: Tensor
    whole: Tensor


def products(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor, Led]:
    """Compute ``Σ_d k_id k_jd Γ_ijd`` for j < i and ``Σ_d q_id k_jd Γ_ijd`` for j ≤ i, between no Γ and eQ."""
    query, key = chunks.query, chunks.key
    eye = torch.eye(_TILE, dtype=key.dtype, device=key.device)
    alone = torch.stack((torch.zeros_like(eye), eye), 1)  # a token with itself: of queries alone
    found = dots(query, key).unflatten(1, (-1, _TILE)).unsqueeze(-1) * alone  # [M, C / W, W, 2, W]
    masks, level = _masks(key), _tokens(chunks)
    for mask in masks:
        if level.tile > found.shape[-1]:
            found = _in_larger_tiles(found)
        product = torch.bmm(level.rows(), level.columns().transpose(-1, -2))
        found.addcmul_(product.view(found.shape), mask[: level.tile, None, : level.tile])
        level = _joined(level, _carried(level))
    led_key, led_query = (x.contiguous() for x in level.later.unbind(2))
    of_keys, of_queries = (x.contiguous() for x in found.squeeze(1).unbind(2))
    all_led = Led(led_key, None, level.earlier * chunks.beta, level.whole[:, 0])
    return key.new_empty(0), of_keys, of_queries, led_query, all_led


def led(chunks: Chunks, decays: Decays) -> Led:
    """Give keys the decays to the bounds of their chunk."""
    lead, trail, whole = decays
    return Led(chunks.key * lead, None, chunks.key * (trail * chunks.beta), whole)


def gradients_of_gates(chunks: Chunks, decays: Decays, of_products: OfProducts, _: Tensor, of_led: OfLed) -> Gradients:
    """Compute the gradients of queries, keys and sums of gates.

    A sum enters as that of a later token, or as that of an earlier one, so that its gradient is what the gradients of
    later tokens make with them, less what those of earlier ones do. These go from the chunk down to single tokens: a
    level adds what its pairs give.

    Args:
        chunks: the tokens.
        decays: of them.
        of_products: the gradients of products.
        of_led: those of keys and queries with their decays; that of βlK is written over.
    """
    query, key, beta = chunks.query, chunks.key, chunks.beta
    weights = torch.stack((of_products.keys * -beta.transpose(-1, -2), of_products.queries * beta.transpose(-1, -2)), 2)
    masks, tiles = [*_masks(key)], weights.unsqueeze(1)
    levels = [_tokens(chunks)]
    carried = [_carried(levels[0])]
    first_decays = levels[0].whole
    while 2 * levels[-1].size < CHUNK:
        levels.append(_joined(levels[-1], carried[-1]))
        carried.append(_carried(levels[-1]))
    later, earlier = torch.stack((of_led.key, of_led.query), 2), None
    signs = torch.arange(-1, 2, 2, dtype=key.dtype, device=key.device).unsqueeze(-1)  # that of keys is of -eK
    carried[-1] = carried[-1]._replace(later=carried[-1].later * signs)
    while levels:
        level, carry, mask = levels.pop(), carried.pop(), masks.pop()
        if level.tile < tiles.shape[-1]:
            tiles = _in_smaller_tiles(tiles)
        pairs = (tiles * mask[: level.tile, None, : level.tile]).flatten(2, 3).flatten(0, 1)
        of_rows, of_columns = torch.bmm(pairs, level.columns()), torch.bmm(pairs.transpose(-1, -2), level.rows())
        later = _plus_carried(of_rows.view(later.shape), later, carry.later)
        of_columns = of_columns.view(key.shape)
        earlier = of_columns if earlier is None else _plus_carried(of_columns, earlier, carry.earlier)
    later = later * first_decays.unsqueeze(2)
    later_key, later_query = (x.contiguous() for x in later.unbind(2))
    sums = (query * later_query).addcmul_(key, later_key - earlier)
    alone = weights[:, :, 1].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # a token with itself: no gate has part in it
    trailed = of_led.trailed.mul_(decays.trail)
    grad_key = earlier.add_(later_key).addcmul_(query, alone).addcmul_(trailed, beta)
    kept = trailed.mul_(key)
    of_beta = kept.sum(-1, keepdim=True)
    return Gradients(later_query.addcmul_(key, alone), grad_key, sums, of_beta, kept.mul_(beta))


def _tokens(chunks: Chunks) -> _Level:
    """Return the level of single tokens, each of which is a half."""
    whole = _first_decays(chunks.gates)
    later = torch.stack((chunks.key, chunks.query), 2) * whole.unsqueeze(2)
    return _Level(1, later, chunks.key, whole)


def _carried(level: _Level) -> _Carried:
    """Compute what takes the decays of a level to those of the next one."""
    first, second = (x.contiguous() for x in level.whole.unflatten(1, (-1, 2)).unbind(2))
    one, other = torch.eye(2, dtype=first.dtype, device=first.device).unsqueeze(-1).unbind()
    later = torch.addcmul(one, other, first.unsqueeze(2))  # 1, and the decay
    earlier = torch.addcmul(other, one, second.unsqueeze(2))
    return _Carried(later[:, :, :, None, None], earlier[:, :, :, None], first * second)


def _joined(level: _Level, carried: _Carried) -> _Level:
    """Return the level of halves that are pairs of a level's."""
    by_half = (-1, 2, level.size)
    later = (level.later.unflatten(1, by_half) * carried.later).flatten(1, 3)
    earlier = (level.earlier.unflatten(1, by_half) * carried.earlier).flatten(1, 3)
    return _Level(2 * level.size, later, earlier, carried.whole)


def _plus_carried(own: Tensor, above: Tensor, factor: Tensor) -> Tensor:
    """Add to the gradients that the pairs of a level give those of the level above it, times the decays to there."""
    by_half = (factor.shape[1], 2, -1)
    own.unflatten(1, by_half).addcmul_(above.unflatten(1, by_half), factor)
    return own


def _first_decays(gates: Gates) -> Tensor:
    """Compute the decays of single tokens, ``[M, C, K]``; nothing is left of what comes before a sequence."""
    each = gates.each.exp()
    if gates.bounds is None:
        return each
    same, carried, _ = gates.bounds
    behind = same.diagonal(-1, dim1=-2, dim2=-1)[:, :, None, :, None]  # whether a token belongs to that before it
    first = ~torch.cat([carried[..., :1, :], behind], 3)
    return each.unflatten(0, (*same.shape[:2], -1)).masked_fill_(first, 0).flatten(0, 2)


def _masks(like: Tensor) -> Tensor:
    """Return for each size of halves 1 where a token of a second half meets one of the first half before it.

    ``[log₂ C, C, C]``. What writes to such pairs alone is left to the AI CPU: solve_tril.py.
    """
    places = torch.arange(CHUNK, dtype=like.dtype, device=like.device)
    sizes = places[: CHUNK.bit_length() - 1].exp2().round().unsqueeze(-1)
    pairs = (places / (2 * sizes)).floor()
    is_second = (places / sizes).floor() - 2 * pairs
    same = pairs.unsqueeze(2) == pairs.unsqueeze(1)
    return same * is_second.unsqueeze(2) * (1 - is_second).unsqueeze(1)


def _in_larger_tiles(x: Tensor) -> Tensor:
    """Put each two of ``[M, C / W, W, 2, W]`` on the diagonal of a tile, ``[M, C / 2W, 2W, 2, 2W]``."""
    eye = torch.eye(2, dtype=x.dtype, device=x.device)[:, None, None, :, None]
    return (x.unflatten(1, (-1, 2)).unsqueeze(5) * eye).flatten(5).flatten(2, 3)


def _in_smaller_tiles(x: Tensor) -> Tensor:
    """Copy the two tiles on the diagonals of ``[M, C / 2W, 2W, 2, 2W]``, ``[M, C / W, W, 2, W]``."""
    return x.unflatten(4, (2, -1)).unflatten(2, (2, -1)).diagonal(dim1=2, dim2=5).movedim(-1, 2).flatten(1, 2)
