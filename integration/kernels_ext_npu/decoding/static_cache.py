"""Write one token into a static cache, and move nothing else: without a copy of the cache, or a number of the host.

``index_copy_`` along the positions of a cache ``[B, N, S, D]``, which transformers calls, transposes the whole cache
before it writes and back behind it: CANN's ops-nn, index/scatter_update/op_host/op_api/aclnn_index_copy.cpp. As rows
``[B * N * S, D]`` it takes ``npu_scatter_nd_update_``, which writes in place (index/scatter_nd_update, likewise).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.matching.source_tree import function_source

# SHA-256 of the methods that these were written from: `update` of both classes in transformers 5.20.2 to 5.22.2, and
# `update_indexer` in 5.22.2
_READ = {
    "20cf2ec9c082ded9c20a20f8696a988db838731649f712f1435db7645a30b7ca",
    "ee4886d3398efef610b76c1e6a8e30e642bd15b6e3c3365ab532efdfd38c8965",
    "e292f922e791d7160e09319d1078485767d16317957675238959bdf90408016b",
}
_WRITTEN = (torch.float16, torch.bfloat16, torch.float32)  # what the operator takes, of what models compute in


def install(patches: Patches) -> None:
    """Let layers of static caches take one token anew."""
    for cls in (StaticLayer, StaticSlidingWindowLayer):
        patches.method(cls, "update", _update, registration.is_active)
    if hasattr(cache_utils, "StaticIndexedLayer"):
        patches.method(cache_utils.StaticIndexedLayer, "update_indexer", _update_indexer, registration.is_active)


def _update(
    original: Callable, self: StaticLayer, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Write a token: the number of tokens is the place of the next one, until it is added to.

    A window that is full moves on by one: transformers' masks go by the order of what is in it.
    """
    if not (self.is_initialized and _is_one_token(original, key_states, value_states)):
        return original(self, key_states, value_states, *args, **kwargs)
    caches: Any = self.keys, self.values
    is_full = False
    if isinstance(self, StaticSlidingWindowLayer):
        is_full = self.cumulative_length_int >= self.max_cache_len
        self.cumulative_length_int += 1
    if is_full:
        for cache, states in zip(caches, (key_states, value_states)):
            cache[:, :, :-1].copy_(cache[:, :, 1:].clone())
            cache[:, :, -1:].copy_(states)
    else:
        _write(self, self.cumulative_length, *zip(caches, (key_states, value_states)))
    return caches


def _update_indexer(original: Callable, self: Any, indexer_key_states: Tensor) -> Tensor:
    """Write the key ``[B, 1, D]`` of a token for an indexer."""
    if not (self.is_indexer_initialized and _is_one_token(original, indexer_key_states)):
        return original(self, indexer_key_states)
    _write(self, self.indexer_cumulative_length, (self.indexer_keys, indexer_key_states))
    return self.indexer_keys


def _is_one_token(original: Callable, *states: Tensor) -> bool:
    """Tell whether states are of one token, and of such a kind that it is written by the operator."""
    return not torch.compiler.is_compiling() and _was_read(original) and all(map(_is_written, states))


def _is_written(states: Tensor) -> bool:
    needs_gradient = torch.is_grad_enabled() and states.requires_grad  # the operator has no derivative
    return states.shape[-2] == 1 and states.device.type == "npu" and states.dtype in _WRITTEN and not needs_gradient


def _write(layer: Any, length: Any, *written: tuple[Tensor, Tensor]) -> None:
    """Write states of a token behind those that caches of one form hold, and count it.

    Args:
        layer: whose caches they are.
        length: how many tokens they hold, a tensor.
        written: each cache ``[..., S, D]``, with the states ``[..., 1, D]``.
    """
    rows = (_first_rows(layer, written[0][0]) + length).unsqueeze(1)
    for cache, states in written:
        size = cache.shape[-1]
        torch.ops.npu.npu_scatter_nd_update_(cache.view(-1, size), rows, states.reshape(-1, size))
    length.add_(1)


def _first_rows(layer: Any, cache: Tensor) -> Tensor:
    """Return in which rows of a cache the first tokens of its sequences and heads are; made once for a layer."""
    made, sequences, room = vars(layer).setdefault("_first_rows", {}), cache[..., 0, 0].numel(), cache.shape[-2]
    if sequences not in made:
        made[sequences] = torch.arange(0, sequences * room, room, device=cache.device)
    return made[sequences]


@functools.cache
def _was_read(method: FunctionType) -> bool:
    """Tell whether a method of the installed release is one that was read."""
    return hashlib.sha256((function_source(method) or "").encode()).hexdigest() in _READ
