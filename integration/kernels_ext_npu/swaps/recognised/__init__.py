"""Norms, gated MLPs, activations, routers and rotations of other people's code, which are found by running them.

Such a module gets a forward that hands the layer what plays its roles, whatever the names. Where a setting has changed
since, the forward of its class computes. A method that rotates is replaced in its class, and so in all models.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.loaded_kernels import forward_owner, set_forward
from kernels_ext_npu.binding.step_aside import guarded_forward
from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS, ROTARY, ROUTERS
from kernels_ext_npu.matching.classification import rotary_methods
from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.module_state import has_hooks
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.decision import LIBRARIES, RECOGNISED, Decision, Finder, Swapping, View
from kernels_ext_npu.swaps.gate_up_layout import why_apart

if TYPE_CHECKING:
    from kernels_ext_npu.recognition.computed import Recognised, Steps
    from kernels_ext_npu.recognition.moe_blocks.formulas import MoEBlock

_IDENTITY = nn.Identity()
_WHAT = "_kernels_recognised"  # attribute of a forward of ours: what the module was recognised as


def find(view: View) -> Iterator[Decision]:
    """Decide of every module that is a norm, gated MLP, activation, router or rotation by what it computes.

    So it does of every method that is called as a rotation is.
    """
    for path, module in view.named:
        what = view.recognised.get(module)
        before = getattr(vars(module).get("forward"), _WHAT, None)  # a method has what its function has
        present = before and before.computed.layer
        if what is None and present:
            reason: str | None = refusals.unknown_forward(view.not_recognised.get(module))
            yield Decision(path, module, None, reason, present, kind=KIND_OF_LAYER[present].in_models)
        elif what is not None and not (what.computed.rotation and _calls_rotation(view, module)):
            layer = what.computed.layer or None
            kind = KIND_OF_LAYER[layer].in_models if layer else ROTARY.in_models
            layer = None if what.computed.refused else layer
            make = functools.partial(_make_forward, what, type(module).forward)
            left = what.computed.rotation and what.computed.rotation.left
            doubt = refusals.left_calls(left) if left else None
            if what.computed.router is not None:
                from kernels_ext_npu.swaps.recognised.routers import why_aside

                doubt = why_aside(module, what.computed.router)
            expected = not (what.computed.refused and kind == ROUTERS.in_models)  # of routers many do without
            reason = _refusal(module, what, before)
            yield Decision(path, module, layer, reason, present, doubt, kind, is_candidate=expected, make=make)
        elif what is None and view.facts[type(module)].is_run and not _calls_rotation(view, module):
            methods = _rotary_methods(type(module))
            yield from (_decide_method(path, module, cls, name) for name, cls in methods.items())


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Bind the forwards, and take those out of modules that compute something else by now."""
    wanted = [decision for decision in decisions if decision.reason in (None, refusals.OTHER_SETTINGS)]
    for method in wanted:
        if method.function is not None and method.make is not None:
            method.make()
    fitting = {decision.module: decision.make for decision in wanted if decision.function is None}
    forwards = {module: make() for module, make in fitting.items() if make is not None}
    for module in view.owned(RECOGNISED):
        if vars(module)["forward"].__func__ is not forwards.get(module):
            set_forward(module, None, RECOGNISED)
    for module, forward in forwards.items():
        if (rotation := view.recognised[module].computed.rotation) is not None and "forward" not in vars(module):
            rotation.left = None
        set_forward(module, forward, RECOGNISED)
        if (pair := _gate_and_up(module, view.recognised[module])) is not None:
            registration.package("SwiGLU").packing.pack(*pair)
    for module, block in _blocks(view, forwards):  # once their experts have their forwards
        from kernels_ext_npu.swaps.recognised import moe_blocks

        moe_blocks.prepare(module, block)


def revert(view: View) -> None:
    """Put methods back, in all models of their classes."""
    if (active := registration.current) is None:
        return
    for each in [cls for cls, facts in view.facts.items() if facts.is_run]:
        for name, cls in _rotary_methods(each).items():
            active.patches.give_back(cls, name)


def remarks(view: View, served: list[Decision]) -> dict[Decision, str | None]:
    """Say of gated MLPs why they multiply twice, and of blocks why they compute expert by expert."""
    found: dict[Decision, str | None] = {}
    decisions = {decision.module: decision for decision in served if decision.function is None}
    for module, block in _blocks(view, decisions):
        from kernels_ext_npu.swaps.recognised import moe_blocks

        found[decisions[module]] = moe_blocks.remark(module, block)
    if (package := registration.try_package("SwiGLU")) is None:
        return found
    for decision in served:
        what = view.recognised.get(decision.module)
        pair = None if what is None else _gate_and_up(decision.module, what)
        if pair is not None and forward_owner(pair[0]) is None:  # of those with adapters their own rows tell
            apart = why_apart(pair, package.packing)
            if apart is not None:
                found[decision] = f"two products, since {apart}"
    return found


def _calls_rotation(view: View, module: nn.Module) -> bool:
    """Tell whether a module calls a function that rotates, and that a kernel serves where it stands."""
    called = [callee for callee in view.facts[type(module)].functions if callee.kind is ROTARY]
    return any(find_pattern(each.function) or getattr(view.rotations.get(each), "layer", "") for each in called)


def _rotary_methods(cls: type[nn.Module]) -> dict[str, type[nn.Module]]:
    """Return the methods that are called as rotations are, by their names, and the class that has each."""
    others = [base for base in reversed(cls.__mro__) if not base.__module__.startswith(LIBRARIES)]
    return {name: base for base in others for name in rotary_methods(base)}


def _decide_method(path: str, module: nn.Module, cls: type[nn.Module], name: str) -> Decision:
    """Decide of a method, which may be replaced where it reads no more of its module than settings."""
    from kernels_ext_npu.recognition.rotations.methods import find_rotating_method
    from kernels_ext_npu.swaps.recognised.rotations import method_in_place, place_method

    own, rotations = method_in_place(cls, name)
    found = find_rotating_method(module, own)
    layer = found.layer or None if found is not None else None
    if layer is not None:
        reason = refusals.elsewhere(module) or refusals.unwanted(module, LAYERS[layer])
    else:
        reason = refusals.METHOD if found is None else refusals.unknown_function(found.refused)
    return Decision(
        path,
        module,
        layer,
        reason,
        layer if reason is None and found in (rotations or ()) else None,
        refusals.left_calls(found.left) if found is not None and found.left else None,
        kind=ROTARY.in_models,
        function=name,
        class_name=f"{cls.__name__}.{name}",
        make=functools.partial(place_method, cls, name, found) if found is not None and layer else None,
    )


def _blocks(view: View, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, MoEBlock]]:
    """Return those of some modules that send tokens to experts in a list."""
    known = [(module, view.recognised[module].computed.block) for module in modules if module in view.recognised]
    return [(module, block) for module, block in known if block is not None]


def _gate_and_up(module: nn.Module, what: Recognised) -> tuple[Any, Any] | None:
    """Return the projections of a gated MLP whose weights are laid side by side; None if there are no two."""
    roles: dict[str, Any] = dict(what.computed.projections)
    return (module._modules[roles["gate_proj"]], module._modules[roles["up_proj"]]) if "gate_proj" in roles else None


def _refusal(module: nn.Module, what: Recognised, before: Recognised | None) -> str | None:
    """Return why the layer does not take the place of a module's forward; None if it may."""
    if what.computed.refused is not None:
        return what.computed.refused
    if what.computed.rotation is not None and not what.computed.layer:
        return Reason("unknown", f"{refusals.FORWARD_UNKNOWN}: {what.computed.rotation.refused}")
    reason = refusals.elsewhere(module) or refusals.unwanted(module, LAYERS[what.computed.layer])
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


def _make_forward(what: Recognised, matched: FunctionType) -> FunctionType:
    return _forward_with(registration.package(LAYERS[what.computed.layer]), what, matched)


@functools.cache
def _forward_with(package: ModuleType, what: Recognised, matched: FunctionType) -> FunctionType:
    """Return the forward that computes by a layer what a module was recognised as."""
    from kernels_ext_npu.recognition import module_settings  # models of transformers do without

    computed = what.computed
    if computed.rotation is not None:
        from kernels_ext_npu.swaps.recognised.rotations import make_module_forward

        turning = make_module_forward(what, matched)
        turning.__qualname__ = f"{RECOGNISED}.{turning.__name__}"
        setattr(turning, _WHAT, what)
        return turning
    if computed.block is not None:
        from kernels_ext_npu.swaps.recognised import moe_blocks

        at_once = moe_blocks.make_block_forward(what, matched)
        at_once.__qualname__ = f"{RECOGNISED}.{at_once.__name__}"
        setattr(at_once, _WHAT, what)
        return at_once
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
        return module_settings.has_settings(module, what.settings) and _are_unwatched(module, what)

    def compute(module: nn.Module, x: Tensor, *others: Tensor | None) -> Any:
        roles = _Roles(module, what, matched, dropouts)
        if computed.wants_one_dtype and any(
            p is not None and p.dtype is not x.dtype for p in roles._parameters.values()
        ):
            return matched(module, x, *others)
        y = layer(roles, _call(module, computed.ahead, x), *others)
        y = _call(module, computed.behind, y.to(x.dtype) if computed.casts_back else y)
        return y if computed.returned is None else tuple(y if each is ... else each for each in computed.returned)

    def forward(self: nn.Module, x: Tensor) -> Any:
        return compute(self, x)

    def gated_forward(self: nn.Module, x: Tensor, gate: Tensor | None = None) -> Any:
        return compute(self, x, gate)

    made: Any = gated_forward if "Gated" in computed.layer else forward
    if computed.router is not None:
        from kernels_ext_npu.swaps.recognised.routers import make_router_forward

        made = make_router_forward(package, computed.router, matched)
    made.__qualname__ = f"{RECOGNISED}.{made.__name__}"
    guarded = guarded_forward(made, matched, holds)
    setattr(guarded, _WHAT, what)
    return guarded


def _call(module: nn.Module, steps: Steps, x: Tensor) -> Tensor:
    """Call children one after the other; a number is the rate of a dropout."""
    for step in steps:
        x = F.dropout(x, step, module.training) if isinstance(step, float) else module._modules[step](x)  # type: ignore[misc]
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
        self._modules: dict[str, Any] = {
            role: _IDENTITY if name is None else module._modules[name] for role, name in computed.projections
        }
        if computed.activation is not None:
            self._modules["act_fn"] = computed.activation
        if computed.between is not None:
            role, steps = computed.between
            self._modules[role] = self._between(steps, dropouts)
        vars(self).update(self._parameters, **self._modules, **dict(computed.numbers))

    def _between(self, steps: Steps, dropouts: dict[bool, nn.Module]) -> Any:
        if len(steps) > 1:
            return functools.partial(_call, self.module, steps)
        (step,) = steps
        return dropouts[self.training] if isinstance(step, float) else self.module._modules[step]

    def forward(self, *arguments: Tensor) -> Tensor:
        """Compute what the layer leaves to the module."""
        return self.matched(self.module, *arguments)


FINDER = Finder("recognised", find, put, revert=revert, remarks=remarks)
