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
from .mask_functions import MaskStructure, recognise_mask_function

_HAS_NO_PADDING = "_npu_flash_attention_without_padding"  # an attribute of what attention_mask returns


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

    Causal, sliding, bidirectional, chunked and packed masks are recognised, and need no tensor. The tensor of any other
    is computed here, once for all layers.

    Args:
        batch_size: the batch size.
        q_length: the number of queries.
        kv_length: the number of keys.
        q_offset: the position of the first query; a tensor with a static cache.
        kv_offset: the position of the first key.
        mask_function: maps indices to whether a query sees a key; causal by default.
        attention_mask: ``[B, tokens]``, False where a token is padding; or what this function returned before.
        use_vmap: whether ``mask_function`` takes one index at a time, and not tensors of indices.
        device: where the mask would be.
        allow_is_causal_skip: whether the module's ``is_causal`` counts in place of a causal mask.
        allow_is_bidirectional_skip: whether it counts in place of a full mask.
        kwargs: further arguments of transformers' mask functions, which this one does not need.

    Returns:
        What ``attention_forward`` takes as its mask. Treated as a tensor it is bool ``[B, 1, q_length, kv_length]``;
        under ``torch.compile`` it is that tensor.
    """
    if isinstance(attention_mask, MaskDescription):  # made by an outer model, which passes it on to its inner one
        return attention_mask
    is_token = None if attention_mask is None else _key_padding(attention_mask, kv_offset, kv_length)

    compiling = torch.compiler.is_compiling()
    function, structure = mask_function or _causal, None
    if not compiling:
        structure = MaskStructure(CAUSAL) if mask_function is None else recognise_mask_function(mask_function)
    # a band aligns the last query with the last key; with a static cache only the device knows if that is so
    has_distances = structure not in (None, MaskStructure(FULL))  # asked first, else a graph is for these lengths alone
    if has_distances and (isinstance(q_offset, Tensor) or q_offset + q_length != kv_offset + kv_length):
        structure = None

    def make(begin: int = 0, end: int = q_length) -> Tensor:
        if is_token is not None and q_length == 1 and _last_query_sees_all(structure, kv_length):
            return (
                is_token[:, None, None].expand(batch_size, -1, -1, -1).clone()
            )  # a copy: the padding belongs to the caller
        where = device if is_token is None else is_token.device
        batch_indices, heads = torch.arange(batch_size, device=where), torch.arange(1, device=where)
        queries = torch.arange(begin, end, device=where) + q_offset
        keys = torch.arange(kv_length, device=where) + kv_offset
        mask = (_vmapped if use_vmap else _broadcast)(function, batch_indices, heads, queries, keys)
        mask = mask.expand(batch_size, -1, end - begin, kv_length)
        return mask if is_token is None else mask & is_token[:, None, None]

    if compiling:  # a graph can hold neither host values of lengths nor the closures of functions
        mask = make().contiguous()  # with the strides of a mask with padding, so that both share one graph
        setattr(mask, _HAS_NO_PADDING, is_token is None)
        return mask
    if structure is not None and structure.chunk is not None:
        has_positions = structure.positions is not None
        structure = _resolve_chunks(structure, q_length, kv_length, kv_offset, attention_mask is not None)
        if has_positions and structure is not None and structure.band == CAUSAL:
            function = _causal_within(structure.sequence_ids)
    defers_to_is_causal = structure is not None and (
        allow_is_causal_skip or allow_is_bidirectional_skip or structure.sequence_ids is not None
    )
    padding = None if structure is None else is_token
    description = MaskDescription(q_length, kv_length, structure, padding, make, defers_to_is_causal)
    setattr(description, _HAS_NO_PADDING, is_token is None)
    if structure is None:
        description.mask()  # computed now: layers advance the offset of a static cache
    return description


def is_without_padding(mask: MaskDescription | Tensor) -> bool:
    """Tell whether a mask was made by :func:`attention_mask` without padding, so that ``cu_seqlens`` may add to it."""
    return getattr(mask, _HAS_NO_PADDING, False)


def _last_query_sees_all(structure: MaskStructure | None, keys: int) -> bool:
    """Tell whether the last query sees all keys but padding."""
    return (
        structure is not None
        and structure.sequence_ids is None
        and structure.chunk is None
        and structure.band.within(1, keys) == FULL
    )


def _causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def _key_padding(padding: Tensor, first: int, keys: int) -> Tensor:
    """Return the part of a padding mask for keys from ``first`` on, bool ``[B, keys]``, False beyond its end."""
    missing = first + keys - padding.shape[1]
    padding = F.pad(padding, (0, missing)) if missing > 0 else padding
    return padding[:, first : first + keys].bool()


def _broadcast(function: Callable, batch_indices: Tensor, heads: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Call a mask function with all indices at once."""
    return function(
        batch_indices.view(-1, 1, 1, 1), heads.view(1, -1, 1, 1), queries.view(1, 1, -1, 1), keys.view(1, 1, 1, -1)
    )


def _vmapped(function: Callable, *indices: Tensor) -> Tensor:
    """Call a mask function that is written for one index at a time."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=tuple(0 if i == dim else None for i in range(4)))
    with TransformGetItemToIndex():  # lets a tensor without dimensions index another one
        return function(*indices)


def _resolve_chunks(
    structure: MaskStructure, queries: int, keys: int, first: int, has_padding: bool
) -> MaskStructure | None:
    """Return a structure that says the same for keys from position ``first`` on; None where only a mask does.

    Padding moves the chunks, so that with padding nothing is known beyond the first chunk.
    """
    chunk, last = structure.chunk, first + keys - 1
    if structure.sequence_ids is not None:
        is_prompt = queries == keys and not has_padding
        return replace(structure, sequence_ids=_chunk_ids(structure), chunk=None, positions=None) if is_prompt else None
    if last < chunk or (not has_padding and first // chunk == last // chunk):
        return replace(structure, chunk=None)
    if has_padding:
        return None
    if queries == 1:
        reach = last % chunk
        left = reach if structure.band.left is None else min(reach, structure.band.left)
        return replace(structure, band=Band(left, structure.band.right), chunk=None)
    return structure if first == 0 and queries == keys else None


def _chunk_ids(structure: MaskStructure) -> Tensor:
    """Return ids that are the same for tokens in one chunk of one sequence, ``[B, S]``.

    Chunks are counted by positions only where the batch is packed: transformers remaps no positions in other batches.
    """
    sequence_ids = structure.sequence_ids
    # int32: CANN divides and sums int64 on an AI CPU
    positions = torch.arange(sequence_ids.shape[-1], dtype=torch.int32, device=sequence_ids.device)
    if structure.positions is not None:
        is_packed = (sequence_ids != sequence_ids[:, :1]).any()
        positions = torch.where(is_packed, structure.positions.int(), positions)
    begins = (torch.diff(sequence_ids) != 0) | (torch.diff(positions // structure.chunk) != 0)
    return F.pad(begins.cumsum(-1, dtype=torch.int32), (1, 0))


def _causal_within(sequence_ids: Tensor) -> Callable:
    """Return the mask function of causal attention within packed sequences."""

    def function(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (sequence_ids[batch, query] == sequence_ids[batch, key]) & (key <= query)

    return function
