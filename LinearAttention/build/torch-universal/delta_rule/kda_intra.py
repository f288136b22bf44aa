"""Products of keys and queries within chunks where every channel of a key has a decay: Kimi delta attention.

``Σ_d a_id b_jd exp(sum_id - sum_jd)`` is no matrix product, and all its terms take C times the memory of a and b. But
with a token m between j and i it is one of ``a_id exp(sum_id - sum_md)`` and ``b_jd exp(sum_md - sum_jd)``, and neither
exponential exceeds one.

So a chunk is halved, its halves are halved, and so on down to single tokens. Any two tokens i > j are parted by one of
these halvings, with i in the second half and j in the first, and m is the last token of that first half. Of eight
tokens, halves of four have the pairs (4..7, 0..3), halves of two (2..3, 0..1) and (6..7, 4..5), and halves of one the
rest. Six sizes of halves make a chunk of 64: six products, each of whole tiles, of which a mask keeps the pairs that
halves of this size part.

Keys and queries lie side by side in one tensor, and products take whole tensors where one half would do: a strided
tensor is copied before an operator reads it, and again behind an operator that writes to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..utils.chunk_layout import CHUNK
from .decays import ChunkGradients, DecayedGradients, DecayedKeys, Decays, LogDecays, ProductGradients, row_dots
from .tokens import Chunks

_TILE = 16  # rows and columns of which the device makes its products


class _Level(NamedTuple):
    """Holds keys and queries with their decays within halves of one size.

    Attributes:
        size: the tokens of a half, b.
        from_start: keys and queries with the decays from the start of their half, ``[M, C, 2, K]``.
        to_end: keys with the decays to the end of their half, ``[M, C, K]``.
        half_decay: the decays over whole halves, ``[M, C / b, K]``.
    """

    size: int
    from_start: Tensor
    to_end: Tensor
    half_decay: Tensor

    def rows(self) -> Tensor:
        """View keys and queries by tiles, ``[M C / W, 2 W, K]``; two halves that are a pair lie in one tile."""
        return self.from_start.flatten(1, 2).unflatten(1, (-1, 2 * self.tile)).flatten(0, 1)

    def columns(self) -> Tensor:
        """View the keys with decays to the end by tiles, ``[M C / W, W, K]``."""
        return self.to_end.unflatten(1, (-1, self.tile)).flatten(0, 1)

    @property
    def tile(self) -> int:
        """The tokens of a tile, W."""
        return max(_TILE, 2 * self.size)


class _Extension(NamedTuple):
    """Holds the factors that extend the decays of a level to halves of twice the size.

    Attributes:
        from_start: 1 for tokens of first halves, and the decay over the first half for those of second ones,
            ``[M, P, 2, 1, 1, K]``.
        to_end: the decay over the second half for tokens of first halves, and 1 for those of second ones,
            ``[M, P, 2, 1, K]``.
        half_decay: the decays over both halves, ``[M, P, K]``.
    """

    from_start: Tensor
    to_end: Tensor
    half_decay: Tensor


def intra_products(chunks: Chunks) -> tuple[Tensor, Tensor, Tensor, Tensor, DecayedKeys]:
    """Compute what a chunk needs of keys, queries and decays.

    Returns:
        An empty tensor in the place of Γ; ``Σ_d k_id k_jd Γ_ijd`` for j < i and ``Σ_d q_id k_jd Γ_ijd`` for j ≤ i,
        ``[M, C, C]``; queries with the decays from the start of their chunk, ``[M, C, K]``; and the keys with theirs.
    """
    query, key = chunks.query, chunks.key
    eye = torch.eye(_TILE, dtype=key.dtype, device=key.device)
    only_queries = torch.stack((torch.zeros_like(eye), eye), 1)  # a key has no product with itself here
    tiles = row_dots(query, key).unflatten(1, (-1, _TILE)).unsqueeze(-1) * only_queries  # [M, C / W, W, 2, W]
    masks, level = _halving_masks(key), _token_level(chunks)
    for mask in masks:
        if level.tile > tiles.shape[-1]:
            tiles = _merge_tiles(tiles)
        product = torch.bmm(level.rows(), level.columns().transpose(-1, -2))
        tiles.addcmul_(product.view(tiles.shape), mask[: level.tile, None, : level.tile])
        level = _extend(level, _extension(level))
    key_from_start, q_cumdecay = (x.contiguous() for x in level.from_start.unbind(2))
    kk, qk = (x.contiguous() for x in tiles.squeeze(1).unbind(2))
    keys = DecayedKeys(key_from_start, None, level.to_end * chunks.beta, level.half_decay[:, 0])
    return key.new_empty(0), kk, qk, q_cumdecay, keys


def decay_keys(chunks: Chunks, decays: Decays) -> DecayedKeys:
    """Give keys the decays to the start and the end of their chunk."""
    from_start, to_end, chunk_decay = decays
    return DecayedKeys(chunks.key * from_start, None, chunks.key * (to_end * chunks.beta), chunk_decay)


def intra_gradients(
    chunks: Chunks, decays: Decays, products: ProductGradients, _: Tensor, decayed: DecayedGradients
) -> ChunkGradients:
    """Compute the gradients of queries, keys and sums of g.

    A token's sum enters with a plus where the token is the later one of a pair, and with a minus where it is the
    earlier one. So its gradient is the product of queries and keys with their gradients as later tokens, less that of
    keys with their gradients as earlier ones. These are computed from the halves of a chunk down to single tokens: each
    level adds the pairs that it parts.

    Args:
        chunks: the tokens.
        decays: their decays.
        products: the gradients of products.
        decayed: the gradients of queries and keys with their decays; that of ``k_beta_to_end`` is written over.
    """
    query, key, beta = chunks.query, chunks.key, chunks.beta
    d_products = torch.stack((products.neg_kk * -beta.transpose(-1, -2), products.qk * beta.transpose(-1, -2)), 2)
    masks, tiles = [*_halving_masks(key)], d_products.unsqueeze(1)
    levels = [_token_level(chunks)]
    extensions = [_extension(levels[0])]
    token_decay = levels[0].half_decay
    while 2 * levels[-1].size < CHUNK:
        levels.append(_extend(levels[-1], extensions[-1]))
        extensions.append(_extension(levels[-1]))
    as_later, as_earlier = torch.stack((decayed.neg_key, decayed.query), 2), None
    signs = torch.arange(-1, 2, 2, dtype=key.dtype, device=key.device).unsqueeze(-1)  # -1 for keys, 1 for queries
    extensions[-1] = extensions[-1]._replace(from_start=extensions[-1].from_start * signs)
    while levels:
        level, extension, mask = levels.pop(), extensions.pop(), masks.pop()
        if level.tile < tiles.shape[-1]:
            tiles = _split_tiles(tiles)
        pairs = (tiles * mask[: level.tile, None, : level.tile]).flatten(2, 3).flatten(0, 1)
        d_rows, d_columns = torch.bmm(pairs, level.columns()), torch.bmm(pairs.transpose(-1, -2), level.rows())
        as_later = _add_extended(d_rows.view(as_later.shape), as_later, extension.from_start)
        d_columns = d_columns.view(key.shape)
        as_earlier = d_columns if as_earlier is None else _add_extended(d_columns, as_earlier, extension.to_end)
    as_later = as_later * token_decay.unsqueeze(2)
    key_as_later, query_as_later = (x.contiguous() for x in as_later.unbind(2))
    d_cumsum = (query * query_as_later).addcmul_(key, key_as_later - as_earlier)
    on_diagonal = d_products[:, :, 1].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)  # a token with itself, without a decay
    to_end = decayed.k_beta_to_end.mul_(decays.to_end)
    d_key = as_earlier.add_(key_as_later).addcmul_(query, on_diagonal).addcmul_(to_end, beta)
    d_beta_terms = to_end.mul_(key)
    d_beta = d_beta_terms.sum(-1, keepdim=True)
    d_query = query_as_later.addcmul_(key, on_diagonal)
    return ChunkGradients(d_query, d_key, d_cumsum, d_beta, d_beta_terms.mul_(beta))


def _token_level(chunks: Chunks) -> _Level:
    """Return the level in which each token is a half."""
    decay = _token_decay(chunks.log_decays)
    from_start = torch.stack((chunks.key, chunks.query), 2) * decay.unsqueeze(2)
    return _Level(1, from_start, chunks.key, decay)


def _extension(level: _Level) -> _Extension:
    """Compute the factors from the decays of a level to those of the next one."""
    first, second = (x.contiguous() for x in level.half_decay.unflatten(1, (-1, 2)).unbind(2))
    one_zero, zero_one = torch.eye(2, dtype=first.dtype, device=first.device).unsqueeze(-1).unbind()
    from_start = torch.addcmul(one_zero, zero_one, first.unsqueeze(2))  # 1, and the decay
    to_end = torch.addcmul(zero_one, one_zero, second.unsqueeze(2))  # the decay, and 1
    return _Extension(from_start[:, :, :, None, None], to_end[:, :, :, None], first * second)


def _extend(level: _Level, extension: _Extension) -> _Level:
    """Return the level of halves of twice the size."""
    by_half = (-1, 2, level.size)
    from_start = (level.from_start.unflatten(1, by_half) * extension.from_start).flatten(1, 3)
    to_end = (level.to_end.unflatten(1, by_half) * extension.to_end).flatten(1, 3)
    return _Level(2 * level.size, from_start, to_end, extension.half_decay)


def _add_extended(own: Tensor, larger: Tensor, factor: Tensor) -> Tensor:
    """Add to the gradients of a level those of the level with larger halves, times the factors between the two."""
    by_half = (factor.shape[1], 2, -1)
    own.unflatten(1, by_half).addcmul_(larger.unflatten(1, by_half), factor)
    return own


def _token_decay(log_decays: LogDecays) -> Tensor:
    """Compute the decays of single tokens, ``[M, C, K]``; zero where a sequence begins."""
    decay = log_decays.g.exp()
    if log_decays.masks is None:
        return decay
    same, reads_state, _ = log_decays.masks
    continues = same.diagonal(-1, dim1=-2, dim2=-1)[:, :, None, :, None]  # the sequence of the token before
    begins = ~torch.cat([reads_state[..., :1, :], continues], 3)
    return decay.unflatten(0, (*same.shape[:2], -1)).masked_fill_(begins, 0).flatten(0, 2)


def _halving_masks(like: Tensor) -> Tensor:
    """Return, for halves of 1, 2, 4, …, 1 for a token of a second half (row) and one of the first half before it.

    ``[log₂ C, C, C]``. They are computed from places: only the AI CPU writes to such pairs alone, solve_tril.py.
    """
    places = torch.arange(CHUNK, dtype=like.dtype, device=like.device)
    sizes = places[: CHUNK.bit_length() - 1].exp2().round().unsqueeze(-1)
    pairs = (places / (2 * sizes)).floor()
    is_second = (places / sizes).floor() - 2 * pairs
    same_pair = pairs.unsqueeze(2) == pairs.unsqueeze(1)
    return same_pair * is_second.unsqueeze(2) * (1 - is_second).unsqueeze(1)


def _merge_tiles(x: Tensor) -> Tensor:
    """Put each two of ``[M, C / W, W, 2, W]`` on the diagonal of a tile, ``[M, C / 2W, 2W, 2, 2W]``."""
    eye = torch.eye(2, dtype=x.dtype, device=x.device)[:, None, None, :, None]
    return (x.unflatten(1, (-1, 2)).unsqueeze(5) * eye).flatten(5).flatten(2, 3)


def _split_tiles(x: Tensor) -> Tensor:
    """Copy the two tiles on the diagonals of ``[M, C / 2W, 2W, 2, 2W]``, ``[M, C / W, W, 2, W]``."""
    return x.unflatten(4, (2, -1)).unflatten(2, (2, -1)).diagonal(dim1=2, dim2=5).movedim(-1, 2).flatten(1, 2)
