"""Write tokens into a static cache, and move nothing else of it: without a copy of it, or a number of the host.

``index_copy_`` along the positions of a cache ``[B, N, S, D]``, which transformers calls, transposes the whole cache
before it writes and back behind it: CANN's ops-nn, index/scatter_update/op_host/op_api/aclnn_index_copy.cpp.
``scatter_update_`` writes in place (index/scatter, likewise).
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
from kernels_ext_npu.binding.devices import is_capturing
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.syntax.source_tree import function_source

# SHA-256 of the methods that these were written from: `update` of both classes in transformers 5.20.2 to 5.22.2, and
# `update_indexer` in 5.22.2
_READ = {
    "20cf2ec9c082ded9c20a20f8696a988db838731649f712f1435db7645a30b7ca",
    "ee4886d3398efef610b76c1e6a8e30e642bd15b6e3c3365ab532efdfd38c8965",
    "e292f922e791d7160e09319d1078485767d16317957675238959bdf90408016b",
}
_WRITTEN = (torch.float16, torch.bfloat16, torch.float32)  # what both operators take, of what models compute in


def install(patches: Patches) -> None:
    """Let layers of static caches take tokens anew."""
    for cls in (StaticLayer, StaticSlidingWindowLayer):
        patches.method(cls, "update", _update, registration.is_active)
    if hasattr(cache_utils, "StaticIndexedLayer"):
        patches.method(cache_utils.StaticIndexedLayer, "update_indexer", _update_indexer, registration.is_active)


def _update(
    original: Callable, self: StaticLayer, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Write tokens: the number of those before them is their place, until it is added to.

    A window that is full moves on by a token: transformers' masks go by the order of what is in it. More tokens than
    there is room for are transformers'.
    """
    count, is_full, is_served = key_states.shape[-2], False, _are_written(original, key_states, value_states)
    if isinstance(self, StaticSlidingWindowLayer):
        is_full = self.cumulative_length_int >= self.max_cache_len
        is_served &= count == 1 or self.cumulative_length_int + count <= self.max_cache_len
    if not is_served:
        return original(self, key_states, value_states, *args, **kwargs)
    if not self.is_initialized:
        self.lazy_initialization(key_states, value_states)
    if isinstance(self, StaticSlidingWindowLayer):
        self.cumulative_length_int += count
    caches: Any = self.keys, self.values
    if is_full:
        for cache, states in zip(caches, (key_states, value_states)):
            cache[:, :, :-1].copy_(cache[:, :, 1:].clone())
            cache[:, :, -1:].copy_(states)
    else:
        _write(self.cumulative_length, count, *zip(caches, (key_states, value_states)))
    return caches


def _update_indexer(original: Callable, self: Any, indexer_key_states: Tensor) -> Tensor:
    """Write the keys ``[B, T, D]`` of tokens for an indexer."""
    if not _are_written(original, indexer_key_states):
        return original(self, indexer_key_states)
    if not self.is_indexer_initialized:
        self.lazy_initialization_indexer(indexer_key_states)
    count = indexer_key_states.shape[-2]
    _write(self.indexer_cumulative_length, count, (self.indexer_keys, indexer_key_states))
    return self.indexer_keys


def _are_written(original: Callable, *states: Tensor) -> bool:
    """Tell whether tokens are written by operators of torch_npu, which have no derivative; one alone in a graph."""
    if torch.compiler.is_compiling() or not _was_read(original):
        return False
    if not all(each.device.type == "npu" and each.dtype in _WRITTEN for each in states):
        return False
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in states)
    return not needs_gradient and (states[0].shape[-2] == 1 or not is_capturing())


def _write(length: Any, count: int, *written: tuple[Tensor, Tensor]) -> None:
    """Write states of so many tokens behind those that caches hold, and count them.

    In a graph it is ``npu_scatter_nd_update_`` that writes, as in those of vLLM, a row for each sequence and head: one
    of CANN 9.0 that held ``scatter_update_`` is reported to have failed when it was replayed.

    Args:
        length: how many tokens they hold, a tensor.
        count: how many come.
        written: each cache ``[B, ..., S, D]``, with the states ``[B, ..., T, D]``.
    """
    is_captured = is_capturing()
    for cache, states in written:
        if not states.numel():  # values that a model makes of its keys, such as Mistral Large 4's
            continue
        if is_captured:
            rows = cache.view(-1, cache.shape[-1])
            places = torch.arange(0, len(rows), cache.shape[-2], device=rows.device).add_(length)
            torch.ops.npu.npu_scatter_nd_update_(rows, places.unsqueeze(1), states.reshape(-1, states.shape[-1]))
        else:
            torch.ops.npu.scatter_update_(cache, length.expand(len(cache)), states, -2)
    length.add_(count)


@functools.cache
def _was_read(method: FunctionType) -> bool:
    """Tell whether a method of the installed release is one that was read."""
    return hashlib.sha256((function_source(method) or "").encode()).hexdigest() in _READ
