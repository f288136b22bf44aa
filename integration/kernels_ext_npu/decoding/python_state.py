"""See what Python keeps between the steps of a decoding: a graph replays what the device does, nothing of Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    StaticSlidingWindowLayer,
)

# How many tokens a layer holds, as a number of Python. The steps that are replayed add to it, in `advance`.
COUNT = "cumulative_length_int"
_NESTED = (Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin)
_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))
# attributes of a module with its tensors and children, which are walked separately
_MODULE_MEMBERS = {"_parameters", "_buffers", "_modules"}


def snapshot(model: nn.Module, cache: Cache) -> dict[str, object]:
    """Return all that Python keeps in a model and its cache, by name: plain values, and which memory tensors have."""
    found = dict(_values("cache", cache))
    for path, module in model.named_modules(prefix="model"):
        own = {name: value for name, value in vars(module).items() if name not in _MODULE_MEMBERS}
        for name, value in (*module._parameters.items(), *module._buffers.items(), *own.items()):
            found.update(_values(f"{path}.{name}", value))
    return found


def changed(before: dict[str, object], after: dict[str, object]) -> list[str]:
    """Return the names of what differs, but for the numbers of tokens that `advance` adds to."""
    names = before.keys() | after.keys()
    found = [name for name in names if before.get(name, names) != after.get(name, names)]
    return sorted(name for name in found if not name.endswith(f".{COUNT}"))


def phase(cache: Cache) -> tuple[bool, ...]:
    """Return for each layer with a window whether it is full: from then on its step is another one."""
    return tuple(getattr(layer, COUNT) >= layer.max_cache_len for layer in sliding_layers(cache))


def advance(cache: Cache) -> None:
    """Count the token that a replay has added."""
    for layer in sliding_layers(cache):
        setattr(layer, COUNT, getattr(layer, COUNT) + 1)


def sliding_layers(cache: Cache) -> list[StaticSlidingWindowLayer]:
    """Return the layers that keep the last tokens only."""
    own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return [layer for layer in own.layers if isinstance(layer, StaticSlidingWindowLayer)]


def _values(name: str, value: Any) -> Iterator[tuple[str, object]]:
    if isinstance(value, _PLAIN):
        yield name, value
    elif isinstance(value, torch.Tensor):
        yield name, (value.shape, value.dtype, value.data_ptr() if value.device.type != "meta" else None)
    elif isinstance(value, dict):
        yield name, len(value)
        for key, item in value.items():
            yield from _values(f"{name}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        yield name, len(value)
        for index, item in enumerate(value):
            yield from _values(f"{name}[{index}]", item)
    elif isinstance(value, _NESTED):
        for key, item in vars(value).items():
            yield from _values(f"{name}.{key}", item)
    else:
        yield name, id(value)
