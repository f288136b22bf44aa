"""Grouped heads of gated delta rules: queries and keys are not repeated for the value heads that share them.

Up to transformers 5.22 layers repeat them before they call the rule. Where our kernel computes the rule these lines are
left out (syntax/repeated_heads.py), since it supports grouped heads. Functions are swapped for the whole
process, so each call checks that the kernel is still in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.forward_binding import bound_layer
from kernels_ext_npu.binding.loaded_kernels import MATCHED, class_forward
from kernels_ext_npu.matching.function_scan import called_functions
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.swaps.decision import Decision, Finder, View, bind_forwards
from kernels_ext_npu.syntax.repeated_heads import without_repeats

REPOSITORY = "LinearAttention"
_SHARING = ("ChunkGatedDeltaRule", "FusedRecurrentGatedDeltaRule")  # layers that take fewer heads of queries and keys
_OWNER = "shared_heads"


def find(view: View) -> Iterator[Decision]:
    """Decide to skip repeating queries and keys in layers where the kernel supports grouped heads."""
    if registration.uses(REPOSITORY):
        for cls, modules in view.by_class.items():
            make: Any = functools.partial(_sharing_forward, cls, cls.forward)  # type: ignore[arg-type]
            if make() is not None:
                yield from [Decision("", module, make=make) for module in modules]


@functools.cache
def _sharing_forward(cls: type[nn.Module], original: FunctionType) -> FunctionType | None:
    """Return a forward that skips the repeats while the kernel is in place; None for a class that repeats nothing."""
    patterns = {callee: find_pattern(callee.function) for callee in called_functions(cls)}
    rules = [callee for callee, pattern in patterns.items() if pattern is not None and pattern.layers[0] in _SHARING]
    shared = without_repeats(original, frozenset(rule.name for rule in rules)) if rules else None
    if shared is None:
        return None

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            type(self).forward is original
            and not torch.compiler.is_compiling()
            and all(bound_layer(rule.function) in _SHARING for rule in rules)
        ):
            return shared(self, *args, **kwargs)
        return class_forward(self, forward, original)(self, *args, **kwargs)

    setattr(forward, MATCHED, original)
    return forward  # type: ignore[return-value]


FINDER = Finder("shared heads", find, functools.partial(bind_forwards, _OWNER))
