"""Linear layers with adapters that share an input, such as q, k and v: the first call computes all of them.

The module around them gets a forward that calls that of its class. While it runs, the first of the layers that is
called computes all, and the others, called with the same tensor, return what was cached for them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence, Set
from contextvars import ContextVar
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding.loaded_kernels import class_forward, forward_owner, set_forward
from kernels_ext_npu.swaps.decision import View
from kernels_ext_npu.syntax.shared_inputs import layers_of_one_input

LORA = "lora"  # the owner of forwards of layers with adapters
_OWNER = "linear_groups"


_Outputs = dict[nn.Module, tuple[Tensor, Tensor]]  # layer -> (its input, its output)
# the innermost module with such layers whose forward runs, or one without layers, and the cached outputs of its layers
_running: ContextVar[tuple[nn.Module, _Outputs]] = ContextVar("_running", default=(nn.Module(), {}))


def put(view: View, served: Set[nn.Module]) -> None:
    """Bind the grouping forward to modules in which all layers of one input are served, and remove it from others."""
    around = [module for _, module in view.named if not served.isdisjoint(module._modules.values())]
    for module in (*view.owned(_OWNER), *around):
        forward: Any = type(module).forward
        set_forward(module, _grouped_forward(forward) if any(shared_input_groups(module)) else None, _OWNER)


def shared_input_groups(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Yield the groups of layers that a module calls with one input, where all of a group are served."""
    served = {
        name: child for name, child in module._modules.items() if child is not None and forward_owner(child) == LORA
    }
    for names in layers_of_one_input(module) if len(served) > 1 else ():
        if served.keys() >= set(names):
            yield [served[name] for name in names]


def called_next(layer: nn.Module) -> list[nn.Module]:
    """Return the group of layers of which this one is called first; an empty list if it leads none."""
    module, _ = _running.get()
    return next((group for group in shared_input_groups(module) if group[0] is layer), [])


def cache_outputs(x: Tensor, layers: Sequence[nn.Module], outputs: Sequence[Tensor]) -> None:
    """Cache outputs of layers of one input until they are called, or the forward of their module ends."""
    _, cached = _running.get()
    cached.update({layer: (x, output) for layer, output in zip(layers, outputs, strict=True)})


def pop_cached(layer: nn.Module, x: Tensor) -> Tensor | None:
    """Take the cached output of a layer out; None if there is none, or it was of another input."""
    _, cached = _running.get()
    found = cached.pop(layer, None)
    return found[1] if found is not None and found[0] is x else None


@functools.cache
def _grouped_forward(forward: FunctionType) -> FunctionType:
    """Return the forward of a module with layers of one input: `forward` by name, as a pickle of a model knows it."""

    @functools.wraps(forward)
    def announced(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        original = class_forward(self, announced, forward)
        if torch.compiler.is_compiling():
            return original(self, *args, **kwargs)
        token = _running.set((self, {}))
        try:
            return original(self, *args, **kwargs)
        finally:
            _running.reset(token)

    return announced  # type: ignore[return-value]
