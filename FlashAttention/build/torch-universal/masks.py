"""The mask function that transformers calls, by the contract of its ``AttentionMaskInterface``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from .description import MaskDescription
from .options import Band
from .patterns import Pattern, recognised


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> MaskDescription:
    """Describe the mask of a forward; no tensor is made here.

    Plain patterns, causal, sliding, bidirectional, chunked and packed, are recognised, and go without a mask; any other
    is made as transformers makes it for sdpa, when the first layer wants it.

    Args:
        batch_size: how many sequences there are.
        q_length: how many queries each has.
        kv_length: how many keys each has.
        q_offset: the position of the first query; a tensor with a static cache.
        kv_offset: the position of the first key.
        mask_function: tells of indices whether a query sees a key; causal by default.
        attention_mask: ``[B, tokens]``, False where a token is padding.
        kwargs: what else transformers' own mask functions take.

    Returns:
        What ``attention_forward`` takes as its mask. Treated as a tensor it is bool ``[B, 1, q_length, kv_length]``.
    """
    from transformers import masking_utils

    if mask_function is None:
        mask_function = masking_utils.causal_mask_function

    def make() -> Tensor:
        options = kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length}
        offsets = {"q_offset": q_offset, "kv_offset": kv_offset}
        return masking_utils.sdpa_mask(
            **sizes, **offsets, mask_function=mask_function, attention_mask=attention_mask, **options
        )

    # every pattern is said with the last query at the last key; where a static cache is, only the device knows
    at_the_end = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    pattern = recognised(mask_function) if at_the_end else None
    if pattern is not None and pattern.chunk is not None:
        pattern = _of_chunks(pattern, q_length, kv_length, kv_offset, attention_mask is not None)
    padding = None
    if attention_mask is not None and pattern is not None:
        padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
        padding = padding[:, kv_offset : kv_offset + kv_length]
    return MaskDescription(q_length, kv_length, pattern, padding, make)


def _of_chunks(pattern: Pattern, queries: int, keys: int, first: int, padded: bool) -> Pattern | None:
    """Return a chunked pattern for keys that begin at a position: None where only a mask says it.

    Padding moves the chunks, so that with padding only what ends within the first chunk is known here.
    """
    chunk, last = pattern.chunk, first + keys - 1
    if last < chunk or (not padded and first // chunk == last // chunk):
        return replace(pattern, chunk=None)
    if padded:
        return None
    if queries == 1:
        reach = last % chunk
        left = reach if pattern.band.left is None else min(reach, pattern.band.left)
        return replace(pattern, band=Band(left, pattern.band.right), chunk=None)
    return pattern if first == 0 and queries == keys else None
