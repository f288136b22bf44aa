"""The experts implementation ``npu_grouped_mm`` of transformers.

It is the forward of the layer `MoEExperts`, called by name. While kernels are registered, models that would take
transformers' default take it, on the NPU; on other devices it hands over to that default. Who names another
implementation gets that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from kernels_ext_npu import sources
from kernels_ext_npu.swapping import experts_choice
from kernels_ext_npu.swapping.experts_choice import NAME

LAYER = "MoEExperts"

_source: str | Path | None = None
_layer: type[nn.Module] | None = None


def npu_grouped_mm(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts implementation."""
    if hidden_states.device.type != "npu":
        return grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
    return loaded().forward(self, hidden_states, top_k_index, top_k_weights)


def install(source: str | Path) -> None:
    """Register the implementation, and let models take it that would take the default."""
    global _source
    _source = source
    ALL_EXPERTS_FUNCTIONS.register(NAME, npu_grouped_mm)
    _wrap("get_correct_experts_implementation", _get_correct)
    _wrap("set_experts_implementation", _set)


def remove() -> None:
    """Take the implementation out again, and give its models the default back."""
    global _source, _layer
    _source = _layer = None
    for name in ("get_correct_experts_implementation", "set_experts_implementation"):
        original = getattr(getattr(PreTrainedModel, name), "kernels_ext_npu", None)
        if original is not None:  # otherwise somebody has wrapped it since: then ours stays below, without effect
            setattr(PreTrainedModel, name, original)
    experts_choice.give_all_back()
    ALL_EXPERTS_FUNCTIONS._global_mapping.pop(NAME, None)  # register() has no counterpart


def is_installed() -> bool:
    """Whether models can take the implementation."""
    return _source is not None


def is_loaded() -> bool:
    """Whether the kernel is there already."""
    return _layer is not None


def loaded() -> type[nn.Module]:
    """The layer, which is loaded when it is first asked for."""
    global _layer
    if _layer is None:
        assert _source is not None
        _layer = sources.layer_source(_source, "FusedMoE", LAYER).load()
    return _layer


def try_to_load() -> None:
    """While a graph is captured it would be too late. What is wrong is said when the kernel is needed, if it is."""
    with suppress(Exception):
        loaded()


def _get_correct(original: Callable, self: PreTrainedModel, requested: str | None) -> str:
    chosen = experts_choice.note(self.config, requested, original(self, requested))
    if chosen == NAME:
        try_to_load()
    return chosen


def _set(original: Callable, self: PreTrainedModel, requested: str | dict) -> None:
    """What `kernels` bound to a module does not look at its config, and makes room for what was asked for."""
    from kernels_ext_npu.swapping import forwards
    from kernels_ext_npu.swapping.experts import experts_of

    original(self, requested)
    for module in experts_of(self):
        if experts_choice.named(module.config) is not None:
            forwards.take_out(module)


def _wrap(name: str, replacement: Callable) -> None:
    original = getattr(PreTrainedModel, name)

    @functools.wraps(original)
    def wrapped(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if _source is None:
            return original(self, *args, **kwargs)
        return replacement(original, self, *args, **kwargs)

    wrapped.kernels_ext_npu = original  # type: ignore[attr-defined]
    setattr(PreTrainedModel, name, wrapped)
