"""Recurrences and convolutions along sequences that torch's context parallelism splits between devices.

For a delta rule each exchanges its tokens of all heads for all tokens of some, and the results back. States would be
fewer bytes, but each device would wait for the one in front of it. A convolution gets what stands in front of each
block. Their functions are what `kernels` made of them, called for all models of a process.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.binding.forward_binding import bound_layer
from kernels_ext_npu.context_parallel import attention
from kernels_ext_npu.context_parallel.collectives import Exchange, Gather, Range, Split

_BY_HEADS = ("query", "key", "value", "g", "beta")  # each [B, tokens, heads] or [B, tokens, heads, D]
_NOT_SPLIT = ("initial_state", "output_final_state", "cu_seqlens", "cu_seq_lens_q", "seq_idx")


def serves(function: nn.Module) -> bool:
    """Tell whether `compute` can give a function whole sequences, or it decodes single tokens from a state."""
    return bound_layer(function) in (*_WAYS, "CausalConv1dUpdate", "FusedRecurrentGatedDeltaRule", "FusedRecurrentKDA")


def compute(original: Callable, function: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a function, in place of the ``__call__`` of its class, with what the tokens of this device need of others.

    Raises:
        ValueError: the devices cannot share what it is called with; the message says what to do.
    """
    way = _WAYS.get(bound_layer(function))
    if way is None:
        return original(function, *args, **kwargs)
    call = inspect.signature(function.forward).bind(*args, **kwargs)
    given = call.arguments
    named = given | given.get("kwargs", {})
    if whole := [name for name in _NOT_SPLIT if named.get(name) is not None and named[name] is not False]:
        raise ValueError(
            f"{bound_layer(function)}: torch's context_parallel splits sequences between devices, but no states and no "
            f"packed sequences ({', '.join(whole)}): give the model use_cache=False, and one sequence a row"
        )
    return way(lambda: original(function, *call.args, **call.kwargs), given, attention.current())


def _scan(call: Callable[[], tuple[Tensor, None]], given: dict[str, Any], split: Split) -> tuple[Tensor, None]:
    if given["key"].shape[2] % split.ranks:  # too few, which heads of values share: each gets its own
        groups = given["value"].shape[2] // given["key"].shape[2]
        given.update({name: given[name].repeat_interleave(groups, 2) for name in ("query", "key")})
    for name in _BY_HEADS:
        if given[name].shape[2] % split.ranks:
            raise ValueError(
                f"torch's context_parallel splits sequences between {split.ranks} devices, which cannot share "
                f"{given[name].shape[2]} heads of a recurrence: let a divisor of these share a sequence"
            )
    given.update(zip(_BY_HEADS, Exchange.apply(split, True, *(given[name] for name in _BY_HEADS))))
    result, state = call()
    return Exchange.apply(split, False, result)[0], state


def _convolve(call: Callable[[], Tensor], given: dict[str, Any], split: Split) -> Tensor:
    part, reach = given["hidden_states"].transpose(1, 2), given["weight"].shape[-1] - 1
    places = split.blocks(split.rank)
    rows, size = len(part), part.shape[1] // len(places)
    ranges = tuple(
        Range(row, max(place * size - reach, 0), (place + 1) * size) for row in range(rows) for place in places
    )
    (gathered,) = Gather.apply(split, ranges, reach, part)
    pieces = gathered.split([end - begin for _, begin, end in ranges])
    blocks = [F.pad(piece, (0, 0, reach + size - len(piece), 0)) for piece in pieces]  # the first has nothing in front
    given["hidden_states"] = torch.stack(blocks).transpose(1, 2)
    return call()[:, :, reach:].unflatten(0, (rows, -1)).transpose(1, 2).flatten(2)


_WAYS: dict[str | None, Callable] = {"ChunkGatedDeltaRule": _scan, "ChunkKDA": _scan, "CausalConv1d": _convolve}
