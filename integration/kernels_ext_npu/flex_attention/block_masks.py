"""Masks of torch's ``flex_attention``, described for the kernel: a band and packed sequences need no mask tensor.

A ``BlockMask`` holds a function of one query and one key, and which blocks count. What a query sees is found by running
the function for a block of queries at a time: where each sees one interval of keys, the intervals tell the band and the
sequences; elsewhere the mask is a tensor. Sizes are ``B, N, S_q, S_k``.

A function is run once for all calls, until a tensor that it has read changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary
from transformers import masking_utils

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION

_ELEMENTS = 2**24  # of the mask of a block of queries
_KEPT = 8  # results for each function or mask: of other sizes, say
_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()  # owner -> [(key, the reads, the result)], the newest first


class Reads(TorchDispatchMode):
    """Notes which tensors a function of a user reads while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._states: list[tuple[TensorWeakRef, tuple | None]] = []
        self.made: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensors that are not the user's

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        if operator is not torch.ops.aten.lift_fresh.default:  # of torch.tensor(...) in the function
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            self._states += [(TensorWeakRef(each), _state(each)) for each in given if each not in self.made]
        self.made.update((each, None) for each in tree_leaves(result) if isinstance(each, Tensor))
        return result

    def are_current(self) -> bool:
        """Tell whether the tensors are as they were; of those made in inference mode nobody knows."""
        now = [(ref(), state) for ref, state in self._states]
        return all(tensor is not None and state is not None and _state(tensor) == state for tensor, state in now)


def once(owner: Any, key: tuple, find: Callable[[Reads], Any]) -> Any:
    """Return what `find` does, which has to enter the reads that it is given, for an owner and a key of its own."""
    kept = _kept.setdefault(owner, [])
    for known, reads, result in kept:
        if known == key and reads.are_current():
            return result
    reads = Reads()
    result = find(reads)
    kept[:] = [(key, reads, result), *(each for each in kept if each[0] != key)][:_KEPT]
    return result


def describe_block_mask(mask: BlockMask) -> Any:
    """Describe the mask of a `BlockMask` for the kernel, once."""
    device = mask.kv_num_blocks.device
    find = lambda reads: describe(mask.shape, device, functools.partial(visible_keys, mask, reads))  # noqa: E731
    return once(mask, (mask.mask_mod,), find)


def describe(sizes: Sequence[int], device: torch.device, visible: Callable[[int, int], Tensor]) -> Any:
    """Return a description of a mask, or the mask, bool ``[B, N, S_q, S_k]``, where it is neither band nor sequences.

    Args:
        visible: returns which keys the queries from one index up to another see, bool ``[B, N, queries, S_k]``.
    """
    keys, intervals = torch.arange(sizes[3], dtype=torch.int32, device=device), []
    for begin, end in query_blocks(sizes):
        seen = visible(begin, end)
        first, last = torch.where(seen, keys, sizes[3]).amin(-1), torch.where(seen, keys, -1).amax(-1)
        intervals.append(torch.stack([first, last, seen.sum(-1, dtype=torch.int32)]))
    terms = _terms(sizes, torch.cat(intervals, dim=-1).cpu().long(), device)
    if terms is not None:
        shape = sizes[0], sizes[2], sizes[3], sizes[3] - sizes[2]  # the last query stands at the last key
        options = {"mask_function": masking_utils.and_masks(*terms), "device": device, "allow_is_causal_skip": False}
        return registration.package(NPU_FLASH_ATTENTION.repository).attention_mask(*shape, **options)
    mask = torch.empty(sizes, dtype=torch.bool, device=device)
    for begin, end in query_blocks(sizes):
        mask[:, :, begin:end] = visible(begin, end)
    return mask


def query_blocks(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where blocks of queries begin and end, of so few elements that memory hardly grows."""
    step = max(1, _ELEMENTS // (sizes[0] * sizes[1] * sizes[3]))
    for begin in range(0, sizes[2], step):
        yield begin, min(begin + step, sizes[2])


def at_indices(function: Callable, reads: Reads | None, places: Sequence[Tensor], *scores: Tensor) -> Tensor:
    """Call a function that is written for one score, batch index, head, query and key for some of each at once."""
    noting: AbstractContextManager = nullcontext()
    if reads is not None:
        reads.made.update(dict.fromkeys([*places, *scores]))
        noting = reads
    for dim in (3, 2, 1, 0):
        mapped = (0 if each == dim else None for each in range(4))
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *mapped))
    with TransformGetItemToIndex(), noting:  # lets a tensor without dimensions index another one
        return function(*scores, *places)


def visible_keys(mask: BlockMask, reads: Reads, begin: int, end: int) -> Tensor:
    """Return which keys some queries see: of the blocks that count, those for which the function says so."""
    places = [torch.arange(size, device=mask.kv_num_blocks.device) for size in mask.shape]
    places[2] = places[2][begin:end]
    query_block, key_block = (each // size for each, size in zip(places[2:], mask.BLOCK_SIZE))
    return at_indices(mask.mask_mod, reads, places) & mask.to_dense().bool()[:, :, query_block][..., key_block]


def _terms(sizes: Sequence[int], intervals: Tensor, device: torch.device) -> list[Callable] | None:
    """Return the mask functions of transformers that give these intervals together; None if there are none.

    For example, causal attention within sequences of two and three tokens has the first keys ``0 0 2 2 2`` and the
    last ``0 1 2 3 4``. A sequence begins at a token that no query before it reaches, where none from it on looks back.

    Args:
        intervals: the first key that a query sees, the last, and how many: int64 ``[3, B, N, S_q]`` on the CPU.
    """
    first, last, count = intervals[:, :, 0]  # of the first head: all have to be alike
    if (intervals != intervals[:, :, :1]).any() or (count != last - first + 1).any() or (count == 0).any():
        return None
    queries, keys = sizes[2:]
    places = torch.arange(queries, device="cpu") + keys - queries
    begin, end, terms = torch.zeros_like(first), torch.full_like(last, keys - 1), []
    if queries == keys:
        begins = torch.ones_like(first, dtype=torch.bool)
        earliest = first.flip(-1).cummin(-1).values.flip(-1)
        begins[:, 1:] = (last.cummax(-1).values[:, :-1] < places[1:]) & (earliest[:, 1:] >= places[1:])
        begin = torch.where(begins, places, 0).cummax(-1).values
        end[:, :-1] = torch.where(begins, places, keys).flip(-1).cummin(-1).values.flip(-1)[:, 1:] - 1
        if begins.sum() > len(begins):
            terms = [masking_utils.packed_sequence_mask_function(begins.cumsum(-1).int().to(device))]
    left, right = int((places - first).max()), int((last - places).max())
    is_band = torch.equal(first, (places - left).maximum(begin)) and torch.equal(last, (places + right).minimum(end))
    if torch.equal(first, begin) and torch.equal(last, end):
        return [masking_utils.bidirectional_mask_function, *terms]
    if not is_band or left < 0 or right not in (0, left):
        return None
    if right:
        return [masking_utils.sliding_window_bidirectional_overlay(left), *terms]
    window = [] if torch.equal(first, begin) else [masking_utils.sliding_window_overlay(left + 1)]
    return [*window, masking_utils.causal_mask_function, *terms]


def _state(tensor: Tensor) -> tuple | None:
    return None if tensor.is_inference() else (tensor._version, tensor.requires_grad)
