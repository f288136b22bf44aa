"""Which experts implementation the configs of models name, and who named it."""

from __future__ import annotations

from typing import Any

from torch import nn

from kernels_ext_npu.swapping import state

NAME = "npu_grouped_mm"
DEFAULT = "grouped_mm"  # of transformers
_FIELD = "_experts_implementation_internal"  # what the property `_experts_implementation` of configs reads


def is_experts(module: nn.Module) -> bool:
    """Tell whether the forward of a module calls the implementation that its config names."""
    from kernels_ext_npu.matching.fingerprint import is_experts_class  # register() need not wait for patterns

    return is_experts_class(type(module))


def note(config: Any, requested: str | None, implementation: str) -> str:
    """Return the implementation for a config: ours where the default was not asked for but would be taken.

    Args:
        config: the config of a model.
        requested: what was asked for, None if nothing was.
        implementation: what transformers makes of that.
    """
    assert state.current is not None
    if requested is None and implementation == DEFAULT:
        state.current.patches.note(config, _FIELD, DEFAULT, NAME)
        return NAME
    if requested not in (None, NAME):
        state.current.experts_named[id(config)] = config
    return implementation


def named(config: Any) -> str | None:
    """Return the implementation that somebody asked for; None if nobody did, or it is ours."""
    implementation = getattr(config, "_experts_implementation", None)
    known = state.current.experts_named if state.current is not None else {}
    if implementation in (None, NAME) or (implementation == DEFAULT and id(config) not in known):
        return None
    return str(implementation)


def choose(config: Any) -> None:
    """Let a config name our implementation where it has the default and nobody asked for that."""
    assert state.current is not None
    if named(config) is None and getattr(config, "_experts_implementation", None) == DEFAULT:
        state.current.patches.attribute(config, _FIELD, NAME)


def give_back(config: Any) -> None:
    """Give a config the default again."""
    if config._experts_implementation == NAME:
        setattr(config, _FIELD, DEFAULT)
