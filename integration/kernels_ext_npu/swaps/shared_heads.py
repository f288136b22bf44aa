"""Queries and keys that several heads of values share, handed to a gated delta rule as they are.

Up to transformers 5.22 layers repeat them before they call it, so that no kernel knows that heads are equal. Where the
rule is ours these lines are left out (matching/repeated_heads_scan.py), and heads share their chunks and products. As
functions are swapped for a whole process, each call asks whether they are still ours.
"""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import torch
from torch import nn

from kernels_ext_npu.binding.forward_binding import bound_layer
from kernels_ext_npu.binding.loaded_kernels import MATCHED, set_forward
from kernels_ext_npu.matching.function_scan import CalledFunction, called_functions
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.matching.repeated_heads_scan import without_repeats
from kernels_ext_npu.swaps.protocol import Swapping

REPOSITORY = "LinearAttention"
_SHARING = ("ChunkGatedDeltaRule", "FusedRecurrentGatedDeltaRule")  # layers that take fewer heads of queries and keys
_OWNER = "shared_heads"


def apply(model: nn.Module, swapping: Swapping) -> None:
    """Let the layers of a swapped model repeat no heads for a rule that shares them."""
    if REPOSITORY not in swapping.registration.kernels:
        return
    for cls, modules in swapping.by_class.items():
        if (forward := _sharing_forward(cls, cls.forward)) is not None:  # type: ignore[arg-type]
            for module in modules:
                set_forward(module, forward, _OWNER)


def _shares(callee: CalledFunction) -> bool:
    """Tell whether a function is a rule that a layer of ours computes with shared heads."""
    pattern = find_pattern(callee.function)
    return pattern is not None and pattern.layers[0] in _SHARING


@functools.cache
def _sharing_forward(cls: type[nn.Module], original: FunctionType) -> FunctionType | None:
    """Return the forward of layers that choose, call by call; None for a class that repeats nothing for these rules."""
    rules = [callee for callee in called_functions(cls) if _shares(callee)]
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
        return type(self).forward(self, *args, **kwargs)

    setattr(forward, MATCHED, original)
    return forward  # type: ignore[return-value]
