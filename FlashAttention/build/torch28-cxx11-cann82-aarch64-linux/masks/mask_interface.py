"""The mask function that transformers calls, by the contract of its ``AttentionMaskInterface``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention_spec import CAUSAL, FULL, Band
from .mask_description import MaskDescription
from .mask_functions import Pattern, recognised

_WITHOUT_PADDING = "_npu_flash_attention_without_padding"  # of what attention_mask returns


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: MaskDescription | Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **kwargs: Any,
) -> MaskDescription | Tensor:
    """Describe the mask of a forward.

    Plain patterns, causal, sliding, bidirectional, chunked and packed, are recognised, and go without a mask; any other
    is made here, once for all layers.

    Args:
        batch_size: how many sequences there are.
        q_length: how many queries each has.
        kv_length: how many keys each has.
        q_offset: the position of the first query; a tensor with a static cache.
        kv_offset: the position of the first key.
        mask_function: tells of indices whether a query sees a key; causal by default.
        attention_mask: ``[B, tokens]``, False where a token is padding; or what this function returned before.
        use_vmap: whether ``mask_function`` is to be asked of one index at a time.
        device: where the mask would be.
        allow_is_causal_skip: whether a module says itself if it is causal where nothing but that is described.
        allow_is_bidirectional_skip: the same where nothing is left out.
        kwargs: what else transformers' own mask functions take, and this one does not need.

    Returns:
        What ``attention_forward`` takes as its mask. Treated as a tensor it is bool ``[B, 1, q_length, kv_length]``;
        under ``torch.compile`` it is that tensor.
    """
    if isinstance(attention_mask, MaskDescription):  # a model made it, and hands it to the model inside
        return attention_mask
    kept = None if attention_mask is None else _of_keys(attention_mask, kv_offset, kv_length)

    compiling = torch.compiler.is_compiling()
    pattern = None if compiling else _recognised(mask_function)
    # distances are said with the last query at the last key; where a static cache is, only the device knows
    function = mask_function or _causal
    has_distances = pattern not in (None, Pattern(FULL))  # first: a graph is not to be of these lengths alone
    if has_distances and (isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length):
        pattern = None

    def make(begin: int = 0, end: int = q_length) -> Tensor:
        if kept is not None and q_length == 1 and _is_of_all_keys(pattern, kv_length):
            return kept[:, None, None].expand(batch_size, -1, -1, -1).clone()  # the padding is the caller's
        found_on = device if kept is None else kept.device
        rows, heads = torch.arange(batch_size, device=found_on), torch.arange(1, device=found_on)
        queries = torch.arange(begin, end, device=found_on) + q_offset
        keys = torch.arange(kv_length, device=found_on) + kv_offset
        mask = (_one_by_one if use_vmap else _together)(function, rows, heads, queries, keys)
        mask = mask.expand(batch_size, -1, end - begin, kv_length)
        return mask if kept is None else mask & kept[:, None, None]

    if compiling:  # a graph cannot hold what depends on lengths, nor on what a function closes over
        mask = make().contiguous()  # as with padding, whose batches then need no graph of their own
        setattr(mask, _WITHOUT_PADDING, kept is None)
        return mask
    if pattern is not None and pattern.chunk is not None:
        is_of_positions = pattern.positions is not None
        pattern = _of_chunks(pattern, q_length, kv_length, kv_offset, attention_mask is not None)
        if is_of_positions and pattern is not None and pattern.band == CAUSAL:
            function = _in_sequences(pattern.ids)
    is_of_module = pattern is not None and (
        allow_is_causal_skip or allow_is_bidirectional_skip or pattern.ids is not None
    )
    padding = None if pattern is None else kept
    description = MaskDescription(q_length, kv_length, pattern, padding, make, is_of_module)
    setattr(description, _WITHOUT_PADDING, kept is None)
    if pattern is None:
        description.mask()  # now: a static cache moves its offset on while layers compute
    return description


def is_without_padding(mask: MaskDescription | Tensor) -> bool:
    """Tell whether a mask was made here, and nobody said what is padding: lengths of sequences say more than it."""
    return getattr(mask, _WITHOUT_PADDING, False)


def _recognised(function: Callable | None) -> Pattern | None:
    return Pattern(CAUSAL) if function is None else recognised(function)


def _is_of_all_keys(pattern: Pattern | None, keys: int) -> bool:
    """Tell whether the last query sees all keys that are no padding."""
    return (
        pattern is not None and pattern.ids is None and pattern.chunk is None and pattern.band.within(1, keys) == FULL
    )


def _causal(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _of_keys(padding: Tensor, first: int, keys: int) -> Tensor:
    """Return the padding of the keys from a position on, ``[B, keys]``; what was not said yet is padding."""
    missing = first + keys - padding.shape[1]
    padding = F.pad(padding, (0, missing)) if missing > 0 else padding
    return padding[:, first : first + keys].bool()


def _together(function: Callable, rows: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Ask a mask function of all indices at once."""
    return function(rows.view(-1, 1, 1, 1), heads.view(1, -1, 1, 1), queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1))


def _one_by_one(function: Callable, *indices: Tensor) -> Tensor:
    """Ask a mask function of one index after the other, as a caller may have written it."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for place in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=tuple(0 if i == place else None for i in range(4)))
    with TransformGetItemToIndex():  # an index of a tensor by a tensor without dimensions
        return function(*indices)


def _of_chunks(pattern: Pattern, queries: int, keys: int, first: int, padded: bool) -> Pattern | None:
    """Return a chunked pattern for keys that begin at a position: None where only a mask says it.

    Padding moves the chunks, so that with padding only what ends within the first chunk is known here.
    """
    chunk, last = pattern.chunk, first + keys - 1
    if pattern.ids is not None:
        is_whole = queries == keys and not padded
        return replace(pattern, ids=_chunks_of(pattern), chunk=None, positions=None) if is_whole else None
    if last < chunk or (not padded and first // chunk == last // chunk):
        return replace(pattern, chunk=None)
    if padded:
        return None
    if queries == 1:
        reach = last % chunk
        left = reach if pattern.band.left is None else min(reach, pattern.band.left)
        return replace(pattern, band=Band(left, pattern.band.right), chunk=None)
    return pattern if first == 0 and queries == keys else None


def _chunks_of(pattern: Pattern) -> Tensor:
    """Return which chunk of which sequence each token is in, ``[B, S]``.

    Positions count where any row is packed: of other batches transformers says that they are not, and asks for none.
    """
    ids = pattern.ids
    places = torch.arange(ids.shape[-1], dtype=torch.int32, device=ids.device)  # CANN divides int64 on an AI CPU
    if pattern.positions is not None:
        places = torch.where((ids != ids[:, :1]).any(), pattern.positions.int(), places)
    begins = (torch.diff(ids) != 0) | (torch.diff(places // pattern.chunk) != 0)
    return F.pad(begins.cumsum(-1, dtype=torch.int32), (1, 0))  # and sums int64 there


def _in_sequences(ids: Tensor) -> Callable:
    """Return the mask function of causal attention within sequences."""

    def function(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (ids[row, query] == ids[row, key]) & (key <= query)

    return function
