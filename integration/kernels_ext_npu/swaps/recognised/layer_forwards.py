"""The forward that hands a layer what plays its roles in a module of other people's code."""

from __future__ import annotations

import functools
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.binding.loaded_kernels import forward_owner
from kernels_ext_npu.binding.step_aside import guarded_forward
from kernels_ext_npu.module_state import child_at, has_hooks
from kernels_ext_npu.recognition.computed import Recognised, Steps
from kernels_ext_npu.recognition.module_settings import Settings, has_settings

_IDENTITY = nn.Identity()


def is_as_it_was(module: Any, settings: Settings) -> bool:
    """Tell whether a module has its settings, and nobody sees or changes what the layer does not call."""
    return has_settings(module, settings) and are_unwatched(module, settings)


def are_unwatched(module: nn.Module, settings: Settings) -> bool:
    """Tell whether nobody sees the calls of children that the layer does not call, or has replaced them."""
    for name, theirs in settings.children:
        child: Any = module._modules[name]
        if has_hooks(child) or not has_own_forward(child):
            return False
        if theirs.children and not are_unwatched(child, theirs):
            return False
    return True


def has_own_forward(module: nn.Module) -> bool:
    """Tell whether a module has the forward of its class, or ours in its place."""
    return "forward" not in module.__dict__ or forward_owner(module) is not None


class Members:
    """What a layer reads of a module, by the names that it has for it. torch.compile knows no SimpleNamespace."""

    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


def make_layer_forward(package: ModuleType, what: Recognised, matched: FunctionType) -> FunctionType:
    """Return the forward that hands a layer what plays its roles in a module."""
    computed = what.computed
    layer = getattr(package.layers, computed.layer).forward
    steps = () if computed.between is None else computed.between[1]
    if computed.activation is not None:  # whose values no graph looks at
        package.packing.meet(nn.ModuleDict({"act_fn": computed.activation}))
    dropouts: dict[bool, nn.Module] = {
        mode: nn.Dropout(p).train(mode) for p in steps if isinstance(p, float) for mode in (False, True)
    }

    def holds(module: nn.Module) -> bool:
        if not computed.casts and torch.is_autocast_enabled("npu"):
            return False
        return is_as_it_was(module, what.settings)

    def compute(module: nn.Module, x: Tensor, *others: Tensor | None) -> Any:
        roles = _Roles(module, what, matched, dropouts)
        is_aside = computed.wants_one_dtype and any(
            p is not None and p.dtype is not x.dtype for p in roles._parameters.values()
        )
        if is_aside or x.dim() < computed.dims or not roles.take(x):
            return matched(module, x, *others)
        y = layer(roles, _call(module, computed.ahead, x), *others)
        y = _call(module, computed.behind, y.to(x.dtype) if computed.casts_back else y)
        return y if computed.returned is None else tuple(y if each is ... else each for each in computed.returned)

    def forward(self: nn.Module, x: Tensor) -> Any:
        return compute(self, x)

    def gated_forward(self: nn.Module, x: Tensor, gate: Tensor | None = None) -> Any:
        return compute(self, x, gate)

    def adding_forward(self: nn.Module, x: Tensor, added: Tensor) -> Any:
        return added + compute(self, x)

    made: Any = gated_forward if "Gated" in computed.layer else adding_forward if computed.adds else forward
    if computed.router is not None:
        from kernels_ext_npu.swaps.recognised.routers import make_router_forward

        made = make_router_forward(package, computed.router, matched)
    return guarded_forward(made, matched, holds)


def _call(module: nn.Module, steps: Steps, x: Tensor) -> Tensor:
    """Call children one after the other; a number is the rate of a dropout."""
    for step in steps:
        x = F.dropout(x, step, module.training) if isinstance(step, float) else child_at(module, step)(x)
    return x


class _Roles:
    """The members that a layer reads, by the names that it has for them.

    Where all that is called between is a dropout without a module, it is one of those given, by whether it is trained.
    """

    def __init__(
        self, module: nn.Module, what: Recognised, matched: FunctionType, dropouts: dict[bool, nn.Module]
    ) -> None:
        computed = what.computed
        self.module, self.matched, self.training = module, matched, module.training
        self._parameters = {role: module._parameters.get(name) for role, name in computed.parameters}  # type: ignore[arg-type]
        if computed.dims > 1:
            self._parameters = {role: None if p is None else p.flatten() for role, p in self._parameters.items()}  # type: ignore[misc]
        self._modules: dict[str, Any] = {
            role: _IDENTITY if name is None else child_at(module, name) for role, name in computed.projections
        }
        if computed.activation is not None:
            self._modules["act_fn"] = computed.activation
        if computed.between is not None:
            role, steps = computed.between
            self._modules[role] = self._between(steps, dropouts)
        vars(self).update(self._parameters, **self._modules, **dict(computed.numbers))

    def take(self, x: Tensor) -> bool:
        """Tell whether a tensor is as wide as the weights: a forward may take another one apart, such as into heads."""
        weight, first = self._parameters.get("weight"), next(iter(self._modules.values()), None)
        width = getattr(first, "in_features", None) if weight is None else weight.numel()
        return width is None or width == x.shape[-1]  # torch.compile does not find a size in a tuple

    def _between(self, steps: Steps, dropouts: dict[bool, nn.Module]) -> Any:
        if len(steps) > 1:
            return functools.partial(_call, self.module, steps)
        (step,) = steps
        return dropouts[self.training] if isinstance(step, float) else child_at(self.module, step)

    def forward(self, *arguments: Tensor) -> Tensor:
        """Compute what the layer leaves to the module."""
        return self.matched(self.module, *arguments)
