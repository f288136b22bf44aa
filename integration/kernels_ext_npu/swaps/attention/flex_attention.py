"""torch's ``flex_attention`` on the NPU, computed by the kernel: by its name in transformers, and called directly.

Its masks are described by `block_masks`. A ``score_mod`` is known by what it gives for sample scores: a multiple of the
score, capped or not, with something added that depends on indices; where that is minus infinity, a key is masked out.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as torch_flex_attention
from torch.nn.attention.flex_attention import BlockMask

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.context_parallel import guards
from kernels_ext_npu.swaps.attention import block_masks, calls, eligibility
from kernels_ext_npu.swaps.attention.eligibility import FLEX

_SAMPLES = (-40.0, -3.0, -0.5, 0.25, 1.0, 7.0, 40.0)
_LARGE = 2.0**20  # no cap is larger
_FEW = 32  # queries and keys, at equal distances, for which samples are run
_PRECISION = 1e-5  # of float32, in which a cap is a product of several
_INSTEAD = "compute scores with torch.matmul, or compile flex_attention for triton-ascend before register()"
_BEYOND = (
    f"{FLEX}: on an NPU score_mod may multiply the score, cap it as cap * tanh(score / cap), and then add what depends "
    f"on indices alone, or minus infinity; this one does more: {_INSTEAD}"
)


def kernel_or_flex(
    original: Callable, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of a module that names ``flex_attention`` by the kernel, or else by the original."""
    refusal = eligibility.refusal(module, query.device.type, query.dtype, None)
    if not NPU_FLASH_ATTENTION.is_registered() or refusal is not None:
        if not (mask is None or isinstance(mask, Tensor | BlockMask)):  # the original adds a tensor to scores
            mask = torch.where(mask.mask(query.device), query.new_zeros(()), torch.finfo(query.dtype).min)
        return original(module, query, key, value, mask, **kwargs)
    guards.refuse_partial_sequence(module, FLEX)
    if isinstance(mask, BlockMask):
        mask = block_masks.describe_block_mask(mask)
    if mask is None:  # the original asks no module whether it is causal
        kwargs["is_causal"] = False
    return calls.attend(module, query, key, value, mask, **kwargs), None


def patch_callers(patches: Patches) -> None:
    """Replace the function of torch in its module, and where others have imported it by its name."""
    original = torch_flex_attention.flex_attention
    patches.method(torch_flex_attention, FLEX, flex_attention, NPU_FLASH_ATTENTION.is_registered)
    for name, module in list(sys.modules.items()):
        # transformers calls it for models that name it, which are served by that name
        if not name.startswith("transformers.") and getattr(module, "__dict__", {}).get(FLEX) is original:
            patches.attribute(module, FLEX, torch_flex_attention.flex_attention)


def flex_attention(original: Callable, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Compute ``flex_attention`` of torch, on an NPU by the kernel, with a ValueError for what it cannot."""
    return (_on_npu if query.device.type == "npu" else original)(query, *args, **kwargs)


@torch.compiler.disable
def _on_npu(
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
    if return_lse or return_aux is not None:
        raise ValueError(f"{FLEX}: on an NPU return_lse and return_aux are not supported: {_INSTEAD}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(f"{FLEX}: {query.shape[1]} heads of query and {key.shape[1]} of key need enable_gqa=True")
    key, value = (each.expand(len(query), -1, -1, -1) for each in (key, value))
    scale, cap, added = query.shape[-1] ** -0.5 if scale is None else scale, None, None
    mask = None if block_mask is None else block_masks.describe_block_mask(block_mask)
    if score_mod is not None:
        scores = _Scores(score_mod, [*query.shape[:3], key.shape[2]], query.device)
        factor, cap = scores.factor_and_cap()
        added, is_masking = scores.added()
        is_learned = isinstance(factor, Tensor)
        query, scale = (query * factor.to(query.dtype), scale) if is_learned else (query, scale * factor)
        if is_masking:
            mask = block_masks.describe(scores.sizes, query.device, functools.partial(scores.visible_keys, block_mask))
    options = {"scaling": scale, "softcap": cap, "position_bias": added, "is_causal": False}
    kernel = registration.package(NPU_FLASH_ATTENTION.repository)
    return kernel.attention_forward(None, query, key, value, mask, **options)[0].transpose(1, 2)


class _Scores:
    """What a ``score_mod`` does to scores, found by running it."""

    def __init__(self, score_mod: Callable, sizes: list[int], device: torch.device) -> None:
        self.score_mod, self.sizes = score_mod, sizes
        self._places = [torch.arange(size, device=device) for size in sizes]

    def factor_and_cap(self) -> tuple[Any, float | None]:
        """Return what a score is multiplied by, a tensor where that is learned, and its cap; read of some indices."""
        few = [*self._places[:2], *(each[:: -(-len(each) // _FEW)] for each in self._places[2:])]
        at_zero = self._run(0.0, few)
        is_masked, size = at_zero.isneginf(), at_zero.detach().abs()
        quiet = size.argmin()  # most digits are those of the score where little is added
        at_large, at_one = ((self._run(score, few) - at_zero).flatten()[quiet] for score in (_LARGE, 1.0))
        large, one = torch.stack([at_large, at_one]).detach().tolist()
        factor, cap = large / _LARGE, None
        if abs(one) > 2 * abs(factor) and abs(large) > abs(one):  # large scores grow less than small ones
            cap = abs(large)
            factor = cap * math.atanh(one / cap)
        near = []
        for score in _SAMPLES:
            expected = factor * score if cap is None else cap * math.tanh(factor * score / cap)
            found = self._run(score, few).detach()
            is_near = (found - at_zero.detach() - expected).abs() <= _PRECISION * (1 + abs(expected) + size)
            near.append(torch.where(is_masked, found.isneginf(), is_near))
        if not (math.isfinite(factor) and torch.stack(near).all()):
            raise ValueError(_BEYOND)
        if cap is not None and at_large.requires_grad:
            raise ValueError(f"{FLEX}: on an NPU score_mod may learn nothing beside a cap: {_INSTEAD}")
        return at_large / _LARGE if at_large.requires_grad else factor, cap

    def added(self) -> tuple[Tensor | None, bool]:
        """Return what is added to scores, ``[B, N, S_q, S_k]``, None for nothing; and whether keys are masked out."""
        found, learns = [], False
        for begin, end in block_masks.query_blocks(self.sizes):
            block = self._run(0.0, self._queries(begin, end))
            found.append(torch.stack([block.isneginf().any(), (block.isfinite() & (block != 0)).any()]))
            learns = block.requires_grad
        is_masking, is_adding = torch.stack(found).any(0).tolist()
        if not (is_adding or learns):
            return None, is_masking
        added = self._run(0.0, self._places)
        return added.masked_fill(added.isneginf(), 0.0), is_masking

    def visible_keys(self, block_mask: BlockMask | None, begin: int, end: int) -> Tensor:
        """Return which keys some queries see, also by a block mask, bool ``[B, N, queries, S_k]``."""
        seen = ~self._run(0.0, self._queries(begin, end)).isneginf()
        return seen if block_mask is None else seen & block_masks.visible_keys(block_mask, begin, end)

    def _run(self, score: float, places: list[Tensor]) -> Tensor:
        scores = torch.full([len(each) for each in places], score, device=places[0].device)
        return block_masks.at_indices(self.score_mod, places, scores)

    def _queries(self, begin: int, end: int) -> list[Tensor]:
        return [*self._places[:2], self._places[2][begin:end], self._places[3]]
