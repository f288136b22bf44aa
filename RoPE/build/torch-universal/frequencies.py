"""The frequencies of a rotary embedding of transformers, and what its cos and sin are multiplied with."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def inv_freq_for(module: nn.Module, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Tensor:
    """Return the frequencies for positions, ``[F]``, in float32 on the device of x.

    Those of the rope types dynamic and longrope follow the length: transformers' decorator of the forward that a layer
    takes the place of, ``dynamic_rope_update`` of modeling_rope_utils.py, brings them up to date.
    """
    rope_type = getattr(module, "rope_type", "default")
    if layer_type is not None and isinstance(rope_type, dict):
        rope_type = rope_type[layer_type]
    if isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope"):
        kind = "longrope" if rope_type == "longrope" else "dynamic"
        options = {} if layer_type is None else {"layer_type": layer_type}
        _frequency_update(type(module), kind)(module, position_ids, device=x.device, **options)
    return getattr(module, f"{_prefix(layer_type)}inv_freq").to(device=x.device, dtype=torch.float)


def attention_scaling(module: nn.Module, layer_type: str | None = None) -> float:
    """Return the factor of cos and sin, which may follow the length."""
    return getattr(module, f"{_prefix(layer_type)}attention_scaling")


def _prefix(layer_type: str | None) -> str:
    return "" if layer_type is None else f"{layer_type}_"


def _frequency_update(cls: type[nn.Module], kind: str):
    """Return the function inside of the decorator of a class's forward that changes its frequencies."""
    name, decorated = f"{kind}_frequency_update", cls.forward
    while name not in decorated.__code__.co_freevars:
        decorated = decorated.__wrapped__  # below torch.no_grad, under which it is up to transformers 5.23
    return decorated.__closure__[decorated.__code__.co_freevars.index(name)].cell_contents
