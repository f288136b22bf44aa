"""Which experts implementation the configs of models name, and who named it."""

from __future__ import annotations

import weakref
from typing import Any

NAME = "npu_grouped_mm"
DEFAULT = "grouped_mm"  # of transformers

# by id: configs that took ours in place of the default, and configs whose owner named another one
_chosen: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_named: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def note(config: Any, requested: str | None, implementation: str) -> str:
    """The implementation for a config: ours where the default was not asked for but would be taken.

    Args:
        config: the config of a model.
        requested: what was asked for, None if nothing was.
        implementation: what transformers makes of that.
    """
    if requested is None and implementation == DEFAULT:
        _chosen[id(config)] = config
        return NAME
    if requested not in (None, NAME):
        _named[id(config)] = config
    return implementation


def named(config: Any) -> str | None:
    """The implementation that somebody asked for; None if nobody did, or it is ours."""
    implementation = getattr(config, "_experts_implementation", None)
    if implementation in (None, NAME) or (implementation == DEFAULT and id(config) not in _named):
        return None
    return str(implementation)


def choose(config: Any) -> None:
    """Let a config take ours where it has the default and nobody asked for that."""
    if named(config) is None and getattr(config, "_experts_implementation", None) == DEFAULT:
        config._experts_implementation_internal = NAME
        _chosen[id(config)] = config


def give_back(config: Any) -> None:
    """Give a config the default again."""
    _chosen.pop(id(config), None)
    if config._experts_implementation == NAME:
        config._experts_implementation_internal = DEFAULT


def give_all_back() -> None:
    """The same for every config that took ours unasked; copies of configs are not known here."""
    for config in list(_chosen.values()):
        give_back(config)
    _named.clear()
