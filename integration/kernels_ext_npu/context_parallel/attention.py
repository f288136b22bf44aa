"""Attention of sequences that torch's context parallelism splits between devices.

Each gathers the keys that it sees: behind one all-gather of the keys, and one of the values, a device has one launch,
in which each of its blocks of a sequence is one of its own: the last query stands at the last key that it sees. Packed
sequences are more of them, and of a window only what the next block sees is sent. The gradient sums the keys' gradients
where they came from, by a reduce-scatter. Values travel while keys are put in order, and keys' gradients while those of
values are made. All of that holds for one layer at a time; a layer that is not checkpointed keeps it.

Where there are many devices, neighbours first exchange their tokens of all heads for all tokens of some, as Ulysses
does, and each gathers keys of its heads alone. With as many neighbours as devices there is nothing left to gather.

A ring, as torch has it, sends what gathering does, (ranks - 1) times the part of a device, and once more in the
backward, where keys go round again; it knows neither windows nor sinks nor packed sequences.
"""

from __future__ import annotations

import functools
import math
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn import functional as F
from torch.utils.weak import WeakIdRef, WeakTensorKeyDictionary
from transformers.masking_utils import and_masks, causal_mask_function, packed_sequence_mask_function

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.context_parallel.collectives import Exchange, Gather, Range, Split
from kernels_ext_npu.transformers_internals import cells

_REFUSED = ("position_bias", "indices", "block_indices", "cache", "cu_seq_lens_q", "output_attentions")
# where the sequences of a batch begin, of the tensors that say it to masks
_begins: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
# what `sequences` returned, of positions, with the versions of what it was told
_known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute the attention of a module for the queries of this device, to the keys of all.

    The arguments are those of `attention_forward` of the kernel, with the tokens of this device.

    Returns:
        ``[B, S_q, N, D_v]``.

    Raises:
        ValueError: what is left out is said by a mask, or more is asked for than is computed.
    """
    given = [name for name in _REFUSED if kwargs.get(name) is not None and kwargs[name] is not False]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = None if sliding_window is None else sliding_window - 1
    structure = getattr(attention_mask, "structure", None)
    ids = getattr(structure, "sequence_ids", None)
    is_of_part = ids is not None and ids not in _begins  # sequences of a part, made outside of torch's context
    if attention_mask is not None and (structure is None or structure.chunk is not None or is_of_part):
        given.append("such a mask")
    elif structure is not None:
        left, right = structure.band[:2]
        causal = right == 0 and (causal or not attention_mask.defers_to_is_causal or left is not None)
        given += ["a window behind a token"] if right else []
    if given or (left is not None and not causal):
        raise ValueError(
            f"{type(module).__name__}: torch's context_parallel splits sequences between devices, and there the kernel "
            f"does not compute {', '.join(given) or 'a window behind a token'}: train this model without context "
            "parallelism"
        )
    split = current(not causal and ids is None)
    begins = ((0,),) * len(query) if ids is None else _begins[ids]
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (t.to(torch.get_autocast_dtype(query.device.type)) for t in (query, key, value))
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    heads, keys = split.grouped(_neighbours(split, query, key, left))
    if heads.ranks > 1:
        query, key, value = Exchange.apply(heads, True, query, key, value)
        s_aux = None if s_aux is None else s_aux.chunk(heads.ranks)[heads.rank]
    tokens = query.shape[1]
    lengths, key_lengths, ranges = _pieces(keys.blocks(keys.rank), tokens, tokens * keys.ranks, begins, left, causal)
    if keys.ranks > 1:
        key, value = Gather.apply(keys, ranges, left, key, value)
    else:
        key, value = (tensor.flatten(0, 1) for tensor in (key, value))
    result = registration.package(NPU_FLASH_ATTENTION.repository).flash_attn_varlen_func(
        query.flatten(0, 1),
        key,
        value,
        lengths,
        key_lengths,
        dropout_p=dropout,
        softmax_scale=scaling,
        causal=causal,
        window_size=(-1 if left is None else left, -1),
        softcap=softcap or 0.0,
        s_aux=s_aux,
    )
    result = result.unflatten(0, query.shape[:2])
    return Exchange.apply(heads, False, result)[0] if heads.ranks > 1 else result


def _neighbours(split: Split, query: Tensor, key: Tensor, left: int | None) -> int:
    """Return how many neighbours exchange heads, so that a device sends least; 1 where keys are gathered alone.

    Of each token it sends to its neighbours their heads of the query, the key, the value and the result, and then keys
    and values of its own heads to all other groups; in the backward the same again. Without windows that is least for
    as many neighbours as there can be, or for one, with up to 1 + N / N_k devices. More than N_k never send less:
    copies of keys would travel.

    Args:
        split: how devices share the sequence.
        query: ``[B, tokens, N, D]``.
        key: ``[B, tokens, N_k, D]``.
        left: how many keys in front of a token it sees, None of all: of a block only those at its end are gathered.
    """
    heads, key_heads = query.shape[2], key.shape[2]
    size = query.shape[1] // len(split.blocks(0))

    def sent(neighbours: int) -> float:
        exchanged = (heads + key_heads) * (1 - 1 / neighbours)
        gathered = key_heads * (split.ranks / neighbours - 1)
        return exchanged + (gathered if left is None else gathered * min(left / (neighbours * size), 1))

    common = math.gcd(split.ranks, heads, key_heads)
    return min((number for number in range(1, common + 1) if common % number == 0), key=sent)


def current(in_any_order: bool = False) -> Split:
    """Return how torch splits sequences now.

    Args:
        in_any_order: whether it does not matter where in a sequence a key stands: then parts may be of any length.
    """
    from torch.distributed.tensor.experimental import _attention  # tensor is no import of a process without a group

    function: Any = F.scaled_dot_product_attention  # torch's, in the closure of which there is the mesh
    mesh: Any = cells(function)["device_mesh"]
    is_balanced = _attention._cp_options.enable_load_balance and not in_any_order
    return Split(mesh.get_group(), mesh.get_local_rank(), mesh.size(), is_balanced)


def sequences(tokens: Tensor, positions: Tensor | None, padding: Tensor | None) -> Tensor | None:
    """Return which sequence each token of the whole batch belongs to, or None where each row is one.

    A new one begins where positions do not count on, and where padding begins or ends. The devices exchange what they
    have, and the host reads it, once for all masks of a forward: what is wrong then raises on every device.

    Args:
        tokens: ``[B, S, ...]``, those of this device.
        positions: ``[B or 1, S]``, of this device.
        padding: ``[B, S]``, of this device, 0 where a token is padding.

    Returns:
        ``[B, S of all]``, on the CPU.

    Raises:
        ValueError: the devices have parts of different lengths, or padding lies within a sequence.
    """
    if isinstance(tokens, FakeTensor):
        return None  # nothing can be read: each row is taken for one sequence
    split, (batch, length) = current(), tokens.shape[:2]
    if not split.is_balanced:  # torch balances what it can divide
        (lengths,) = split.gather(torch.tensor([[length]], device=tokens.device))
        if len(set(map(int, lengths))) > 1:
            raise ValueError(
                f"torch's context_parallel splits sequences between {split.ranks} devices, which have parts of "
                f"{', '.join(str(int(part)) for part in lengths)} tokens: pad to a multiple of {2 * split.ranks}"
            )
    if positions is None and padding is None:
        return None
    if padding is not None and padding.shape[1] != length:
        raise ValueError(
            f"torch's context_parallel splits sequences between devices, of which this one has {length} tokens and an "
            f"attention_mask of {padding.shape[1]}: split it as a buffer, too"
        )
    if positions is None:
        return _exchanged(split, batch, positions, padding)
    known, told = _known.get(positions), (_told(positions), _told(padding))
    if known is None or known[0] != told:
        known = _known[positions] = told, _exchanged(split, batch, positions, padding)
    return known[1]


def mask_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a mask, with the sequences of the whole batch where they stand in the place of padding.

    Raises:
        ValueError: the mask is of chunks, which begin and end on other devices.
    """
    config, ids, chunk = kwargs.get("config"), kwargs.get("attention_mask"), kwargs.get("local_size")
    is_chunked = chunk is not None and chunk == getattr(config, "attention_chunk_size", None)
    if is_chunked and kwargs["q_length"] * current().ranks > chunk:
        raise ValueError(
            f"{type(config).__name__}: torch's context_parallel splits sequences between devices, and there the kernel "
            f"does not compute attention in chunks of {chunk} tokens: train this model without context parallelism"
        )
    if ids is None or ids not in _begins:
        return kwargs
    function = and_masks(kwargs.get("mask_function") or causal_mask_function, packed_sequence_mask_function(ids))
    skipped = dict.fromkeys(("allow_is_causal_skip", "allow_is_bidirectional_skip"), False)
    return kwargs | skipped | {"mask_function": function, "attention_mask": None}


def _told(tensor: Tensor | None) -> tuple:
    """Return what is equal while a tensor is the same and nobody has written to it: on all devices, or on none."""
    if tensor is None:
        return ()
    return (object(),) if tensor.is_inference() else (WeakIdRef(tensor), tensor._version)


def _exchanged(split: Split, batch: int, positions: Tensor | None, padding: Tensor | None) -> Tensor | None:
    given = positions if positions is not None else padding
    assert given is not None
    places, kept = (torch.ones_like(given) if tensor is None else tensor for tensor in (positions, padding))
    part = torch.stack([tensor.expand(batch, -1).long() for tensor in (places, kept)], dim=-1)
    (blocks,) = split.gather(part)
    places, kept = torch.cat(blocks, dim=1).cpu().unbind(-1)
    kept = kept != 0
    starts = torch.ones_like(kept)
    starts[:, 1:] = False if positions is None else torch.diff(places) != 1
    begins = starts.clone()
    begins[:, 1:] |= kept[:, 1:] != kept[:, :-1]
    runs = starts.cumsum(1)
    for run, is_seen in zip(runs, begins & kept):
        if run[is_seen].unique().numel() < is_seen.sum():
            raise ValueError(
                "torch's context_parallel splits sequences between devices, and there is padding between tokens of "
                "one sequence: pad in front of it or behind it"
            )
    if bool((begins.sum(1) == 1).all()):
        return None
    ids = begins.cumsum(1)
    _begins[ids] = tuple(tuple(row.nonzero().flatten().tolist()) for row in begins)
    return ids


@functools.lru_cache(maxsize=16)
def _pieces(
    own: tuple[int, ...],
    tokens: int,
    total: int,
    begins: tuple[tuple[int, ...], ...],
    left: int | None,
    causal: bool,
) -> tuple[list[int], list[int], tuple[Range, ...]]:
    """Return where the pieces of this device end, queries and keys, and which keys they are.

    A piece is what a block has of a sequence. Keys of the pieces of a block lie one behind the other.

    For example, of two devices with four tokens each the second has the blocks ``[2, 3]`` and ``[4, 5]``, which see the
    keys before 4 and those before 6: ``[0, 2, 4], [0, 4, 10], ((0, 0, 4), (0, 0, 6))``.
    """
    lengths, key_lengths, ranges = [0], [0], []
    size = tokens // len(own)
    for row, starts in enumerate(begins):
        ends = (*starts[1:], total)
        for place in own:
            seen = []
            for start, end in zip(starts, ends):
                first, last = max(start, place * size), min(end, (place + 1) * size)
                if first < last:
                    begin = start if left is None else max(start, first - left)
                    seen.append((begin, last if causal else end))
                    lengths.append(last - first)
                    key_lengths.append(seen[-1][1] - begin)
            ranges.append(Range(row, seen[0][0], seen[-1][1]))
    return list(accumulate(lengths)), list(accumulate(key_lengths)), tuple(ranges)
