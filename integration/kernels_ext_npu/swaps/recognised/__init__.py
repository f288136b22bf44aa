"""Norms, gated MLPs, activations, routers and rotations of other people's code, which are found by running them.

Such a module gets a forward that hands the layer what plays its roles, whatever the names. Where a setting has changed
since, the forward of its class computes. A method that rotates is replaced in its class, and so in all models.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from kernels_ext_npu.binding import forward_binding, registration
from kernels_ext_npu.binding.forward_binding import our_forward
from kernels_ext_npu.binding.loaded_kernels import OWNER, forward_owner, marked
from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS, ROTARY, ROUTERS, TABLES
from kernels_ext_npu.matching.classification import LIBRARIES, rotary_methods
from kernels_ext_npu.module_state import child_at
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.decision import RECOGNISED, Decision, Finder, Swapping, View
from kernels_ext_npu.swaps.gate_up_layout import why_apart

if TYPE_CHECKING:
    from kernels_ext_npu.recognition.computed import Recognised

_WHAT = "_kernels_recognised"  # attribute of a forward of ours: what the module was recognised as


def find(view: View) -> Iterator[Decision]:
    """Decide of every module that is a norm, gated MLP, activation, router or rotation by what it computes.

    So it does of every method that is called as a rotation is.
    """
    for path, module in view.named:
        what = view.recognised.get(module)
        before = getattr(view.forwards.get(module), _WHAT, None)
        present = before and before.computed.layer
        if what is None and present:
            reason: str | None = refusals.unknown_forward(view.not_recognised.get(module))
            yield Decision(path, module, None, reason, present, kind=KIND_OF_LAYER[present])
        elif what is not None and not (what.computed.rotation and _calls_rotation(view, module)):
            layer = what.computed.layer or None
            kind = KIND_OF_LAYER[layer] if layer else ROTARY
            layer = None if what.computed.refused else layer
            make = functools.partial(_make_forward, what, type(module).forward)
            left = what.computed.rotation and what.computed.rotation.left
            doubt = refusals.left_calls(left) if left else None
            if what.computed.router is not None:
                from kernels_ext_npu.swaps.recognised.routers import why_aside

                doubt = why_aside(module, what.computed.router)
            expected = not (what.computed.refused and kind is ROUTERS)  # of routers many do without
            reason = _refusal(module, what, before)
            yield Decision(path, module, layer, reason, present, doubt, kind, is_candidate=expected, make=make)
        elif what is None and view.facts[type(module)].is_run and not _calls_rotation(view, module):
            methods = _rotary_methods(type(module))
            yield from (_decide_method(path, module, cls, name) for name, cls in methods.items())


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Bind the forwards, and take those out of modules that compute something else by now."""
    wanted = [decision for decision in decisions if decision.reason in (None, refusals.OTHER_SETTINGS)]
    made = {(decision.module, decision.function): decision.make() for decision in wanted if decision.make is not None}
    forwards = {module: forward for (module, function), forward in made.items() if function is None}
    for module, ours in view.forwards.items():
        if getattr(ours, OWNER, None) == RECOGNISED and ours is not forwards.get(module):
            forward_binding.take_out(module)
    for module, forward in forwards.items():
        if our_forward(module) is not forward:
            if (rotation := view.recognised[module].computed.rotation) is not None:
                rotation.left = None
            forward_binding.put(module, forward)
        if (pair := _gate_and_up(module, view.recognised[module])) is not None:
            registration.package("SwiGLU").packing.pack(*pair)
    for module in forwards:
        if (block := view.recognised[module].computed.block) is not None:  # its experts have their forwards by now
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
    for decision in served:
        module = decision.module
        if decision.function is not None or (what := view.recognised.get(module)) is None:
            continue
        if (block := what.computed.block) is not None:
            from kernels_ext_npu.swaps.recognised import moe_blocks

            found[decision] = moe_blocks.remark(module, block)
        pair, package = _gate_and_up(module, what), registration.try_package("SwiGLU")
        if pair is not None and package is not None and forward_owner(pair[0]) is None:  # adapted ones have own rows
            apart = why_apart(pair, package.packing)
            found[decision] = apart and f"two products, since {apart}"
    return found


def _calls_rotation(view: View, module: nn.Module) -> bool:
    """Tell whether a module calls a function that rotates, and that a kernel serves where it stands."""
    return any(f.kind is ROTARY and f in view.function_layers for f in view.facts[type(module)].functions)


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
        kind=ROTARY,
        function=name,
        class_name=f"{cls.__name__}.{name}",
        make=functools.partial(place_method, cls, name, found) if found is not None and layer else None,
    )


def _gate_and_up(module: nn.Module, what: Recognised) -> tuple[Any, Any] | None:
    """Return the projections of a gated MLP whose weights are laid side by side; None if there are no two."""
    roles: dict[str, Any] = dict(what.computed.projections)
    names = [roles[role] for role in ("gate_proj", "up_proj") if role in roles]
    return (child_at(module, names[0]), child_at(module, names[1])) if names else None


def _refusal(module: nn.Module, what: Recognised, before: Recognised | None) -> str | None:
    """Return why the layer does not take the place of a module's forward; None if it may."""
    if what.computed.refused is not None:
        return what.computed.refused
    if what.computed.rotation is not None and not what.computed.layer:
        return Reason("unknown", f"{refusals.FORWARD_UNKNOWN}: {what.computed.rotation.refused}")
    reason = refusals.elsewhere(module) or refusals.unwanted(module, LAYERS[what.computed.layer])
    if reason is not None:
        return reason
    if (wrapped := forward_binding.refuse_wrapper(module)) is not None:
        return wrapped
    from kernels_ext_npu.swaps.recognised.layer_forwards import are_unwatched  # models of transformers do without

    if not are_unwatched(module, what.settings):
        return "hooks watch its activation, which the kernel does not call"
    return refusals.OTHER_SETTINGS if before not in (None, what) else None


def _make_forward(what: Recognised, matched: FunctionType) -> FunctionType:
    return _forward_with(registration.package(LAYERS[what.computed.layer]), what, matched)


@functools.cache
def _forward_with(package: ModuleType, what: Recognised, matched: FunctionType) -> FunctionType:
    """Return the forward that computes by a layer what a module was recognised as."""
    from kernels_ext_npu.swaps.recognised import layer_forwards, moe_blocks, rotations  # other people's models alone

    if what.computed.rotation is not None:
        made = rotations.make_module_forward(what, matched)
    elif KIND_OF_LAYER[what.computed.layer] is TABLES:
        made = rotations.make_table_forward(package, what, matched)
    elif what.computed.block is not None:
        made = moe_blocks.make_block_forward(what, matched)
    else:
        made = layer_forwards.make_layer_forward(package, what, matched)
    setattr(made, _WHAT, what)
    return marked(made, RECOGNISED)


FINDER = Finder("recognised", find, put, revert=revert, remarks=remarks)
