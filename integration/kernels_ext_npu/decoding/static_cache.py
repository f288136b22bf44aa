"""Write one token into a static cache in fewer launches, and without numbers of the host, which no graph holds."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.matching.source_tree import function_source

# SHA-256 of the methods that these were written from: `update` of both classes in transformers 5.20.2 to 5.22.2
_READ = {
    "ee4886d3398efef610b76c1e6a8e30e642bd15b6e3c3365ab532efdfd38c8965",
    "e292f922e791d7160e09319d1078485767d16317957675238959bdf90408016b",
}


def install(patches: Patches) -> None:
    """Let layers of static caches take one token anew."""
    for cls in (StaticLayer, StaticSlidingWindowLayer):
        patches.method(cls, "update", _update, registration.is_active)


def _update(
    original: Callable, self: StaticLayer, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Write a token in three launches: the number of tokens is the place of the next one, until it is added to.

    A window that is full moves on in four.
    """
    is_one = self.is_initialized and key_states.shape[-2] == 1 and key_states.device.type == "npu"
    if torch.compiler.is_compiling() or not is_one or not _was_read(original):
        return original(self, key_states, value_states, *args, **kwargs)
    caches: Any = self.keys, self.values
    is_full = False
    if isinstance(self, StaticSlidingWindowLayer):
        is_full = self.cumulative_length_int >= self.max_cache_len
        self.cumulative_length_int += 1
    length: Any = self.cumulative_length  # a tensor
    for cache, states in zip(caches, (key_states, value_states)):
        if is_full:
            cache.copy_(torch.cat((cache[:, :, 1:], states), dim=-2))
        else:
            cache.index_copy_(2, length, states)
    if not is_full:
        length.add_(1)
    return caches


@functools.cache
def _was_read(method: FunctionType) -> bool:
    """Tell whether a method of the installed release is one that was read."""
    return hashlib.sha256((function_source(method) or "").encode()).hexdigest() in _READ
