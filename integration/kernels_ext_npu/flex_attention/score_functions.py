"""torch's ``flex_attention`` on the NPU, called directly and computed by the kernel.

Its masks are described by `block_masks`. A ``score_mod`` is known by what it gives for sample scores: a multiple of the
score, capped or not, with something added that depends on indices; where that is minus infinity, a key is masked out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.flex_attention import FLEX_ATTENTION, block_masks
from kernels_ext_npu.flex_attention.block_masks import Reads

_SAMPLE = 7.0  # for which all indices are run
_LARGE = 2.0**20  # no cap is larger
_SAMPLES = (-_LARGE, -40.0, -3.0, -0.5, 0.25, 1.0, 40.0)
_FEW = 32  # queries and keys, at equal distances, for which all samples are run
_PRECISION = 1e-5  # of float32, in which a cap is a product of several
_INSTEAD = "flex_attention.__wrapped__ is torch's own, which has all scores in memory where it is not compiled"
_BEYOND = (
    f"{FLEX_ATTENTION}: on an NPU score_mod may multiply the score, cap it as cap * tanh(score / cap), and then add "
    f"what depends on indices alone, or minus infinity; this one does more: {_INSTEAD}"
)


@torch.compiler.disable
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    return_aux: Any = None,
) -> Tensor:
    """Compute ``flex_attention`` of torch by the kernel, with a ValueError for what it cannot."""
    sizes = (*query.shape[:3], key.shape[2])
    if return_lse or return_aux is not None:
        raise ValueError(f"{FLEX_ATTENTION}: on an NPU return_lse and return_aux are not supported: {_INSTEAD}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"{FLEX_ATTENTION}: {query.shape[1]} heads of query and {key.shape[1]} of key need enable_gqa=True"
        )
    if block_mask is not None and block_mask.shape[-2:] != sizes[2:]:
        shape = tuple(block_mask.shape)
        raise ValueError(
            f"{FLEX_ATTENTION}: block_mask is for {shape[2]} queries and {shape[3]} keys, got {sizes[2]} and {sizes[3]}"
        )
    key, value = (each.expand(len(query), -1, -1, -1) for each in (key, value))
    scale, cap, added = query.shape[-1] ** -0.5 if scale is None else scale, None, None
    mask = None if block_mask is None else block_masks.describe_block_mask(block_mask)
    if score_mod is not None:
        scores, place = _Scores(score_mod, sizes, query.device), (sizes, query.device)
        change = block_masks.once(score_mod, (*place, torch.is_grad_enabled()), scores.change)
        cap = change.cap
        if change.learned_at is None:
            scale *= change.factor
        else:
            query = query * scores.factor(change.learned_at).to(query.dtype)
        if change.adds:
            added = scores.at(scores.places, 0.0)
            added = added.masked_fill(added.isneginf(), 0.0)
        if change.masks:
            owner = score_mod if block_mask is None else block_mask
            mask = block_masks.once(owner, (score_mod, *place), functools.partial(scores.describe, block_mask))
    options = {"scaling": scale, "softcap": cap, "position_bias": added, "is_causal": False}
    kernel = registration.package(NPU_FLASH_ATTENTION.repository)
    return kernel.attention_forward(None, query, key, value, mask, **options)[0].transpose(1, 2)


@dataclass(frozen=True)
class _Change:
    """What a ``score_mod`` does to scores."""

    factor: float
    cap: float | None
    learned_at: int | None  # the sample that tells a factor with a gradient
    adds: bool
    masks: bool


class _Scores:
    """Runs a ``score_mod`` for sample scores."""

    def __init__(self, score_mod: Callable, sizes: tuple[int, ...], device: torch.device) -> None:
        self.score_mod, self.sizes, self.device = score_mod, sizes, device

    @functools.cached_property
    def places(self) -> list[Tensor]:
        """Return all indices, of which most calls need none."""
        return [torch.arange(size, device=self.device) for size in self.sizes]

    @functools.cached_property
    def _few(self) -> list[Tensor]:
        return [*self.places[:2], *(each[:: -(-len(each) // _FEW)] for each in self.places[2:])]

    def at(self, places: list[Tensor], score: float, reads: Reads | None = None) -> Tensor:
        """Return what a score becomes at each of some indices."""
        scores = torch.full([len(each) for each in places], score, device=self.device)
        return block_masks.at_indices(self.score_mod, reads, places, scores)

    def factor(self, quiet: int) -> Tensor:
        """Return what large scores are multiplied by, with its gradient, from one of the few samples."""
        return (self.at(self._few, _LARGE) - self.at(self._few, 0.0)).flatten()[quiet] / _LARGE

    def change(self, reads: Reads) -> _Change:
        """Find what the function does: from a few indices, and then whether it does that at all of them."""
        at_zero = self.at(self._few, 0.0, reads)
        quiet = int(at_zero.detach().abs().argmin())  # most digits are those of the score where little is added
        is_learned = self.factor(quiet).requires_grad
        with torch.no_grad():
            zero, large, one = (self.at(self._few, score).flatten()[quiet].item() for score in (0.0, _LARGE, 1.0))
            large, one = large - zero, one - zero
            factor, cap = large / _LARGE, None
            if abs(one) > 2 * abs(factor) and abs(large) > abs(one):  # large scores grow less than small ones
                cap = abs(large)
                factor = cap * math.atanh(one / cap)
            becomes = lambda score: factor * score if cap is None else cap * math.tanh(factor * score / cap)  # noqa: E731
            found = [self._facts(self._few, score, becomes(score)) for score in _SAMPLES]
            for begin, end in block_masks.query_blocks(self.sizes):
                found.append(self._facts(self._queries(begin, end), _SAMPLE, becomes(_SAMPLE)))
            is_another, masks, adds = torch.stack(found).any(0).tolist()
        if is_another or not math.isfinite(factor):
            raise ValueError(_BEYOND)
        if cap is not None and is_learned:
            raise ValueError(f"{FLEX_ATTENTION}: on an NPU score_mod may learn nothing beside a cap: {_INSTEAD}")
        return _Change(factor, cap, quiet if is_learned else None, adds or is_learned, masks)

    @torch.no_grad()
    def describe(self, block_mask: BlockMask | None, reads: Reads) -> Any:
        """Describe which keys are seen, also by a block mask."""

        def visible_keys(begin: int, end: int) -> Tensor:
            seen = ~self.at(self._queries(begin, end), 0.0, reads).isneginf()
            return seen if block_mask is None else seen & block_masks.visible_keys(block_mask, reads, begin, end)

        return block_masks.describe(self.sizes, self.device, visible_keys)

    def _facts(self, places: list[Tensor], score: float, expected: float) -> Tensor:
        """Return whether any score becomes another one than is expected, is masked out, and is added to."""
        at_zero, found = self.at(places, 0.0), self.at(places, score)
        is_masked = at_zero.isneginf()
        is_near = (found - at_zero - expected).abs() <= _PRECISION * (1 + abs(expected) + at_zero.abs())
        is_as_expected = torch.where(is_masked, found.isneginf(), is_near)
        return torch.stack([~is_as_expected.all(), is_masked.any(), (~is_masked & (at_zero != 0)).any()])

    def _queries(self, begin: int, end: int) -> list[Tensor]:
        return [*self.places[:2], self.places[2][begin:end], self.places[3]]
