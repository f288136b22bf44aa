"""Write one token into a static cache without making its place anew in every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import StaticLayer

from kernels_ext_npu.references.fingerprints import function_fingerprint
from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.patches import Patches


def install(patches: Patches) -> None:
    """Let layers of static caches take one token in three launches in place of five, if they are as they were read."""
    if function_fingerprint(StaticLayer.update) == function_fingerprint(update):
        patches.method(StaticLayer, "update", _update, lambda: state.current is not None)


def _update(
    original: Callable, self: StaticLayer, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Do what :func:`update` does: the number of tokens is the place of the next one, until it is added to."""
    if not self.is_initialized or key_states.shape[-2] != 1 or key_states.device.type != "npu":
        return original(self, key_states, value_states, *args, **kwargs)
    assert self.keys is not None
    assert self.values is not None
    place: Any = self.cumulative_length  # a tensor, of one number; transformers annotates an int
    self.keys.index_copy_(2, place, key_states)
    self.values.index_copy_(2, place, value_states)
    place.add_(1)
    return self.keys, self.values


def update(self: Any, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Say what ``StaticLayer.update`` of transformers 5.22.2 does, cache_utils.py."""
    if not self.is_initialized:
        self.lazy_initialization(key_states, value_states)

    kv_length = key_states.shape[-2]
    cache_position = torch.arange(kv_length, device=self.device) + self.cumulative_length
    self.cumulative_length.add_(kv_length)

    try:
        self.keys.index_copy_(2, cache_position, key_states)
        self.values.index_copy_(2, cache_position, value_states)
    except NotImplementedError:
        self.keys[:, :, cache_position] = key_states
        self.values[:, :, cache_position] = value_states

    return self.keys, self.values
