"""Swaps layers of kernels into the modules of a model whose class computes what a layer does.

`kernels` takes a layer for each module whose class is marked for one, by transformers' table, if it is the one that
serves the module. Classes that transformers has not marked are until unregister(). Where another layer serves a module,
it is taken behind that. What stands in transformers' table wins over every later registration: `kernels` is given it
again each time.

Whoever changes the activation of an MLP, the gate of experts or the class of a module gets what that computes from the
next call on; the report says so until ``kernelize()``, ``train()``, ``eval()`` or ``use_kernels = True`` look again,
and take the layer that fits by then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers.integrations import hub_kernels

from kernels_ext_npu import catalogue
from kernels_ext_npu.binding import forward_binding, registration
from kernels_ext_npu.binding.devices import is_elsewhere
from kernels_ext_npu.binding.forward_binding import bound_layer, kernel_forward
from kernels_ext_npu.binding.loaded_kernels import OWNER
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS, Kind
from kernels_ext_npu.distribution import kernels_internals, sources
from kernels_ext_npu.matching.classification import PROJECTIONS, classify_instance, has_gated_projections
from kernels_ext_npu.matching.lookup import find_pattern, why_not_served
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import experts, refusals
from kernels_ext_npu.swaps.decision import RECOGNISED, Decision, Finder, Swapping, View

if TYPE_CHECKING:
    from kernels_ext_npu.recognition.computed import NotRecognised

# kinds of which no kernel is expected to serve all modules
_PARTLY_SERVED = (catalogue.TABLES, catalogue.LAYER_NORMS, catalogue.PATCHES)
# norms that are no RMS norms, so that no kernel could be missing for them
_OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)


def install(active: Registration) -> None:
    """Put the layers of the repositories that are used into transformers' table, for the NPU.

    Layers of those that are not used lose the kernel that they had for the NPU.
    """
    forward_binding.install(active.patches, serves)
    table = hub_kernels.get_kernel_mapping_transformers()
    devices = {layer: {k: kernel for k, kernel in table.get(layer, {}).items() if k != "npu"} for layer in LAYERS}
    used = {layer: repository for layer, repository in LAYERS.items() if repository in active.kernels}
    for layer, source in sources.layer_sources(active.source, used).items():
        devices[layer]["npu"] = source
    active.patches.items(table, devices)
    if (given := kernels_internals.table()) is not None:  # it forgets no entry, and fills a dictionary that is there
        active.patches.items(given, {layer: {} for layer in LAYERS})


def find(view: View) -> list[Decision]:
    """Decide which layer serves each module of a kind that kernels serve, or that has a kernel."""
    found = []
    for path, module in view.named:
        owner = getattr(view.forwards.get(module), OWNER, None)
        if owner == RECOGNISED or module in view.recognised:  # another finder decides
            continue
        if type(module).forward is nn.Module.forward:  # it holds what others call
            continue
        facts = view.facts[type(module)]
        if facts.calls_grouped_mm:  # of another finder, too
            continue
        is_called_by_name = facts.is_experts and experts.is_called_by_name(module)
        present = owner if owner in LAYERS else experts.LAYER if is_called_by_name else None
        kind = facts.kind
        if kind is None and (facts.may_have_kind or not PROJECTIONS.isdisjoint(module._modules)):
            kind = classify_instance(module)
        if kind is None and present is not None:
            kind = KIND_OF_LAYER[present]
        seen = view.not_recognised.get(module)
        if kind is None and seen is not None:
            kind = seen.kind
        if kind is catalogue.ATTENTION or (kind is catalogue.INDEXERS and facts.is_indexer):  # of another finder
            kind = None
        if kind is not None or facts.pattern is not None or present is not None:
            found.append(_decide(path, module, facts.pattern, present, kind, seen))
    return found


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Take the layers that fit, and take those out that no longer do."""
    decisions, is_away = list(decisions), is_elsewhere(view.model)
    layers = {decision.module: _layer_to_put(decision, is_away) for decision in decisions}
    for decision in decisions:
        is_over = decision.present is not None and decision.reason is not None
        if is_over and layers[decision.module] != decision.present:
            forward_binding.take_out(decision.module)
    swapping.registration.module_layers = layers
    serving: dict[Any, str] = {type(module): layer for module, layer in layers.items() if layer is not None}
    for cls in serving:
        if not hasattr(cls, "kernel_layer_name"):
            swapping.registration.patches.attribute(cls, "kernel_layer_name", serving[cls])
    try:
        swapping.bind_layers(swapping.mode)
        others = {m: layer for m, layer in layers.items() if layer and layer != type(m).kernel_layer_name}  # type: ignore[attr-defined]
        # what the kernel of somebody else computes, as a `KernelConfig` may say, is left to it
        left = {m: layer for m, layer in others.items() if bound_layer(m) is not None or kernel_forward(m) is None}
        kernels_internals.bind_layers(left, swapping.mode)
    finally:
        swapping.registration.module_layers = {}


def serves(module: nn.Module, layer: str) -> bool:
    """Tell whether a layer serves a module, or a function that `kernels` made a module of, which `kernels` asks."""
    if registration.current is not None:
        for known in (registration.current.module_layers, registration.current.function_layers):
            if module in known:
                return layer == known[module]
    pattern = find_pattern(type(module))
    return pattern is not None and _refusal(module, pattern) is None and layer == pattern.layer_for(module)


def _decide(
    path: str,
    module: nn.Module,
    pattern: Pattern | None,
    present: str | None,
    kind: Kind | None,
    seen: NotRecognised | None,
) -> Decision:
    layer = pattern.layer_for(module) if pattern else None
    if present is not None:
        return Decision(path, module, layer, _since_swapped(module, pattern, layer, present), present, kind=kind)
    is_other_norm = isinstance(module, _OTHER_NORMS)
    reason: str | None
    if (forward := kernel_forward(module)) is not None:
        layer, reason = None, refusals.served_by(forward)
    elif pattern is not None:
        reason = _refusal(module, pattern)
    elif is_other_norm:
        reason = refusals.NO_RMS_NORM
    else:
        foreign = forward_binding.foreign_forward(module)
        replaced = foreign and Reason("replaced", f"another library replaced its forward: {foreign}")
        reason = replaced or refusals.unknown_forward(seen)
    calls_itself = seen is not None and seen.calls_operator
    is_candidate = kind is not None and not (is_other_norm or calls_itself or _is_other(module, kind, pattern))
    return Decision(path, module, layer, reason, kind=kind, is_candidate=is_candidate)


def _refusal(module: nn.Module, pattern: Pattern) -> str | None:
    """Return why no kernel can take the place of a module's forward, which is that of a pattern; None if one can."""
    reason = refusals.elsewhere(module) or forward_binding.refuse_wrapper(module)
    return reason or _unwanted(module, pattern) or why_not_served(module, pattern)


def _unwanted(module: nn.Module, pattern: Pattern) -> Reason | None:
    """Return why somebody does not want the kernel for an instance; None if nobody said so."""
    if (reason := refusals.unwanted(module, pattern.repository)) is not None:
        return reason
    asked_for = experts.other_than_ours(module.config) if experts.LAYER in pattern.layers else None
    return None if asked_for is None else Reason("named", f"the experts implementation {asked_for} was asked for")


def _since_swapped(module: nn.Module, pattern: Pattern | None, layer: str | None, present: str) -> str | None:
    """Return why the kernel of ours in a module's place no longer fits; None if it does."""
    if KIND_OF_LAYER[present] is catalogue.EXPERTS:
        kernel = experts.serving_package(module)
        if kernel is not None and not kernel.expert_activation.is_current(module):
            return "its gate reads other values"
        if bound_layer(module) is None:  # it is called by name
            return None
    if pattern is None:
        return refusals.FORWARD_UNKNOWN
    reason = _unwanted(module, pattern)
    if reason is not None or pattern.rechecks_every_call:
        return reason
    return why_not_served(module, pattern) or (
        f"it is for {layer} now, and has {present}" if layer != present else None
    )


def _layer_to_put(decision: Decision, is_away: bool) -> str | None:
    """Return the layer that a module is to have; None if none of ours."""
    module = decision.module
    if decision.reason is None:
        stays_behind = is_away and decision.present is not None and is_elsewhere(module)
        return None if stays_behind else decision.layer
    if decision.present is None and decision.layer is not None:
        return None
    pattern = find_pattern(type(module))  # what is there no longer fits, or is somebody else's: another one may
    fits = pattern is not None and _refusal(module, pattern) is None
    return pattern.layer_for(module) if pattern is not None and fits else None


def _take_out(view: View) -> None:
    """Give the modules of a model the forwards of their classes, whatever has put another one there."""
    for _, module in view.named:
        if "forward" in vars(module):
            forward_binding.take_out(module)


def _is_other(module: nn.Module, kind: Kind, pattern: Pattern | None) -> bool:
    """Tell whether no kernel in use is meant for a module.

    It makes cos and sin, or routes, in another way, or no kernel was wanted for it. Of MLPs it is so for those that are
    only called so: what they multiply with is no pair of projections.
    """
    if pattern is None:
        is_only_called_so = kind is catalogue.MLPS and not has_gated_projections(module)
        is_rare = kind in (catalogue.ROUTERS, catalogue.ACTIVATIONS, *_PARTLY_SERVED)
        return is_rare or is_only_called_so or module in registration.restored
    if refusals.unwanted(module, pattern.repository) is not None:
        return True
    return kind in _PARTLY_SERVED and why_not_served(module, pattern) is not None


FINDER = Finder("layers", find, put, install, _take_out)
