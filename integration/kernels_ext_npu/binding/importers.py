"""Which modules have imported a function by its name, so that each has to be patched by itself.

Thousands of modules are there once models are, and to look into one takes a microsecond, since it is in no cache of the
CPU. So each is looked at once, when its import has ended, for all names that are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

FLEX_ATTENTION, REQUESTED, LONGEST = "flex_attention", "is_flash_attention_requested", "get_max_seqlen"
_found: dict[str, dict[str, ModuleType]] = {FLEX_ATTENTION: {}, REQUESTED: {}, LONGEST: {}}
_looked_at: dict[str, ModuleType] = {}


def modules_with(*functions: str) -> dict[str, ModuleType]:
    """Return the modules that have any of these functions since their import, by the names that they have."""
    for name, module in sys.modules.copy().items():  # a list of pairs would let Python collect garbage
        if _looked_at.get(name) is not module:
            _look_at(name, module)
    if len(_looked_at) > len(sys.modules):  # keep none alive
        for name in _looked_at.keys() - sys.modules.keys():
            _forget(name)
    found = [each for function in functions for each in _found[function].items()]
    return {name: module for name, module in found if sys.modules.get(name) is module}


def _forget(name: str) -> None:
    for modules in (_looked_at, *_found.values()):
        modules.pop(name, None)


def _look_at(name: str, module: ModuleType) -> None:
    _forget(name)
    own: Mapping[str, Any] = getattr(module, "__dict__", {})  # some import what they have not, if they are asked for it
    for function, found in _found.items():
        if function in own:
            found[name] = module
    if not getattr(own.get("__spec__"), "_initializing", False):
        _looked_at[name] = module
