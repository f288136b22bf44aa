"""Norms and gated MLPs of other people's code, which are found by running them (matching/by_running.py).

Such a module gets a forward that hands the layer what plays its roles, whatever the names. Where a setting has changed
since, the forward of its class computes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.loaded_kernels import forward_owner, set_forward
from kernels_ext_npu.binding.step_aside import guarded_forward
from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS
from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View

if TYPE_CHECKING:
    from kernels_ext_npu.matching.by_running import Recognised
    from kernels_ext_npu.matching.module_settings import Settings

_OWNER = "recognised"
_WHAT = "_kernels_recognised"  # attribute of a forward of ours: what the module was recognised as


def find(view: View) -> Iterator[Decision]:
    """Decide of every module that is a norm or a gated MLP by what it computes."""
    for path, module in view.named:
        if (what := view.recognised.get(module)) is not None:
            before = getattr(vars(module).get("forward"), _WHAT, None)  # a method has what its function has
            present = before and before.layer
            kind = KIND_OF_LAYER[what.layer].in_models
            make = functools.partial(_make_forward, what, type(module).forward)
            yield Decision(path, module, what.layer, _refusal(module, what, before), present, kind=kind, make=make)


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Bind the forwards, and take those out of modules that compute something else by now."""
    wanted = [decision for decision in decisions if decision.reason in (None, refusals.OTHER_SETTINGS)]
    fitting = {decision.module: decision.make for decision in wanted}
    forwards = {module: make() for module, make in fitting.items() if make is not None}
    for module in view.owned(_OWNER):
        if vars(module)["forward"].__func__ is not forwards.get(module):
            set_forward(module, None, _OWNER)
    for module, forward in forwards.items():
        set_forward(module, forward, _OWNER)
        if (pair := _gate_and_up(module, view.recognised[module])) is not None:
            registration.package("SwiGLU").packing.pack(*pair)


def remarks(view: View, served: list[Decision]) -> dict[Decision, str]:
    """Say of gated MLPs why they multiply twice."""
    found: dict[Decision, str] = {}
    if (package := registration.try_package("SwiGLU")) is None:
        return found
    for decision in served:
        what = view.recognised.get(decision.module)
        pair = None if what is None else _gate_and_up(decision.module, what)
        if pair is not None and forward_owner(pair[0]) is None:  # of those with adapters their own rows tell
            apart = package.packing.separate(*pair)
            if apart is not None:
                found[decision] = f"two products, since {package.packing.obstacle(*pair) or apart}"
    return found


def _gate_and_up(module: nn.Module, what: Recognised) -> tuple[Any, Any] | None:
    """Return the projections of a gated MLP whose weights are laid side by side; None if there are no two."""
    roles = dict(what.roles)
    return (module._modules[roles["gate_proj"]], module._modules[roles["up_proj"]]) if "gate_proj" in roles else None


def _refusal(module: nn.Module, what: Recognised, before: Recognised | None) -> str | None:
    """Return why the layer does not take the place of a module's forward; None if it may."""
    reason = refusals.elsewhere(module) or refusals.unwanted(module, LAYERS[what.layer])
    if reason is not None:
        return reason
    if "forward" in vars(module) and forward_owner(module) is None:
        return "another library has wrapped its forward"
    if not _are_unwatched(module, what):
        return "hooks watch its activation, which the kernel does not call"
    return refusals.OTHER_SETTINGS if before not in (None, what) else None


def _are_unwatched(module: nn.Module, what: Recognised) -> bool:
    """Tell whether nobody sees the calls of children that the layer does not call, or has replaced them."""
    for name, _ in what.settings.children:
        child: Any = module._modules[name]
        if has_hooks(child) or ("forward" in vars(child) and forward_owner(child) is None):
            return False
    return True


def _has(module: Any, settings: Settings) -> bool:
    """Tell whether a module has these settings."""
    if type(module) is not settings.cls or settings.cls.forward is not settings.forward:
        return False
    members, children = vars(module), module._modules
    for name, value in settings.members:
        found = members[name] if name in members else getattr(settings.cls, name, None)
        if type(found) is not type(value) or found != value:  # a tensor is not compared: the host would wait for it
            return False
    return settings.absent.isdisjoint(members) and all(
        _has(children.get(name), inner) for name, inner in settings.children
    )


def _make_forward(what: Recognised, matched: FunctionType) -> FunctionType:
    return _forward_with(registration.package(LAYERS[what.layer]), what, matched)


@functools.cache
def _forward_with(package: ModuleType, what: Recognised, matched: FunctionType) -> FunctionType:
    """Return the forward that computes by a layer what a module was recognised as."""
    layer, roles = getattr(package.layers, what.layer).forward, dict(what.roles)
    eps = roles.pop("variance_epsilon", None)

    def holds(module: nn.Module) -> bool:
        return not torch.compiler.is_compiling() and _has(module, what.settings) and _are_unwatched(module, what)

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return layer(_Roles(self, roles, eps), x)

    forward.__qualname__ = f"{_OWNER}.{forward.__name__}"
    made = guarded_forward(forward, matched, holds)  # type: ignore[arg-type]
    setattr(made, _WHAT, what)
    return made


class _Roles:
    """The members that a layer reads, by the names that it has for them."""

    def __init__(self, module: nn.Module, roles: dict[str, str], eps: float | None) -> None:
        self.training = module.training
        if eps is None:
            self._modules = {role: module._modules[name] for role, name in roles.items()}
        else:
            self._parameters = {role: module._parameters[name] for role, name in roles.items()}
            self.weight, self.variance_epsilon = self._parameters.get("weight"), eps


FINDER = Finder("recognised", find, put, remarks=remarks)
