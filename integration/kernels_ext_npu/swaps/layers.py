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

import functools
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.integrations import hub_kernels

from kernels_ext_npu import catalogue
from kernels_ext_npu.binding import forward_binding, registration
from kernels_ext_npu.binding.forward_binding import bound_layer, kernel_forward
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.catalogue import KIND_OF_LAYER, LAYERS, Kind
from kernels_ext_npu.distribution import kernels_internals, sources
from kernels_ext_npu.matching.classification import classify_module, has_gated_projections
from kernels_ext_npu.matching.indexer_scan import indexer_rewriter
from kernels_ext_npu.matching.lookup import find_pattern, why_not_served
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import gate_up_layout, refusals
from kernels_ext_npu.swaps.experts import serving as experts
from kernels_ext_npu.swaps.experts.implementation import other_than_ours
from kernels_ext_npu.swaps.linear import lora
from kernels_ext_npu.swaps.protocol import Row, Swapping

# kinds of which no kernel is expected to serve all modules
_PARTLY_SERVED = (catalogue.TABLES, catalogue.LAYER_NORMS, catalogue.PATCHES)
# norms that are no RMS norms, so that no kernel could be missing for them
_OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)


def install(active: Registration) -> None:
    """Put the layers of the repositories that are used into transformers' table, for the NPU.

    Layers of those that are not used lose the kernel that they had for the NPU.
    """
    table = hub_kernels.get_kernel_mapping_transformers()
    devices = {layer: {k: kernel for k, kernel in table.get(layer, {}).items() if k != "npu"} for layer in LAYERS}
    used = {layer: repository for layer, repository in LAYERS.items() if repository in active.kernels}
    for layer, source in sources.layer_sources(active.source, used).items():
        devices[layer]["npu"] = source
    active.patches.items(table, devices)
    if (given := kernels_internals.table()) is not None:  # it forgets no entry, and fills a dictionary that is there
        active.patches.items(given, {layer: {} for layer in LAYERS})


def apply(model: nn.Module, swapping: Swapping) -> None:
    """Take the layers that fit, and take those out that no longer do."""
    layers: dict[nn.Module, str | None] = {}
    for cls, modules in swapping.by_class.items():
        reference = find_pattern(cls)
        for module in modules:
            if reference is None and "forward" not in vars(module):
                continue
            layers[module] = layer_for(module, reference)
            if layers[module] != bound_layer(module) and since_swapped(module) is not None:
                forward_binding.take_out(module)
    swapping.registration.module_layers = layers
    serving: dict[Any, str] = {type(module): layer for module, layer in layers.items() if layer is not None}
    for cls in serving:
        if not hasattr(cls, "kernel_layer_name"):
            swapping.registration.patches.attribute(cls, "kernel_layer_name", serving[cls])
    try:
        swapping.bind_layers(swapping.mode)
        marks = {cls: cls.kernel_layer_name for cls in serving}
        others = {module: layer for module, layer in layers.items() if layer and layer != marks[type(module)]}
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
    return layer == layer_for(module, find_pattern(type(module)))


def layer_for(module: nn.Module, reference: Pattern | None) -> str | None:
    """Return the layer that serves a module, whose forward is that of a pattern, on the NPU; None if none does."""
    return None if reference is None or refusal(module, reference) is not None else reference.layer_for(module)


def refusal(module: nn.Module, reference: Pattern | None) -> str | None:
    """Return why no kernel can take the place of a module's forward, which is that of a pattern; None if one can."""
    if reference is None:
        foreign = forward_binding.foreign_forward(module)
        if foreign is not None:
            return Reason("replaced", f"another library replaced its forward: {foreign}")
        return refusals.FORWARD_UNKNOWN
    reason = refusals.elsewhere(module) or forward_binding.refuse_wrapper(module)
    return reason or unwanted(module, reference) or why_not_served(module, reference)


def unwanted(module: nn.Module, reference: Pattern) -> Reason | None:
    """Return why somebody does not want the kernel for an instance; None if nobody said so."""
    if (reason := refusals.unwanted(module, reference.repository)) is not None:
        return reason
    asked_for = other_than_ours(module.config) if experts.LAYER in reference.layers else None
    return None if asked_for is None else Reason("named", f"the experts implementation {asked_for} was asked for")


def revert(model: nn.Module) -> None:
    """Give the modules of a model the forwards of their classes, whatever has put another one there."""
    for module in model.modules():
        forward_binding.take_out(module)


def since_swapped(module: nn.Module) -> str | None:
    """Return why the kernel of ours in a module's place no longer fits; None if it does, or there is none."""
    kernel = experts.serving_package(module)
    if kernel is not None and not kernel.expert_activation.is_current(module):
        return "its gate reads other values"
    layer = bound_layer(module)
    if layer is None:
        return None
    reference = find_pattern(type(module))
    if reference is None:
        return refusals.FORWARD_UNKNOWN
    if reference.rechecks_every_call:
        return unwanted(module, reference)
    reason = unwanted(module, reference) or why_not_served(module, reference)
    if reason is None and reference.layer_for(module) != layer:
        return f"it is for {reference.layer_for(module)} now, and has {layer}"
    return reason


def rows(model: nn.Module) -> Iterator[Row]:
    """Describe every module of a model that is of a kind that kernels serve, or that a kernel was swapped into."""
    for path, module in model.named_modules():
        kind = classify_module(module) or KIND_OF_LAYER.get(bound_layer(module) or "")
        if kind not in (None, catalogue.ATTENTION) and not (
            kind is catalogue.INDEXERS and indexer_rewriter(type(module))
        ):
            yield _row(path, module, kind)


def _row(path: str, module: nn.Module, kind: Kind) -> Row:
    row = functools.partial(Row, path, type(module).__name__, kind=kind.in_models)
    layer = bound_layer(module) or (experts.LAYER if experts.is_called_by_name(module) else None)
    if layer is not None:
        reason = since_swapped(module)
        return row(layer, reason is None, _remark(module) if reason is None else refusals.changed(module, reason))
    pattern = find_pattern(type(module))
    is_candidate = not isinstance(module, _OTHER_NORMS) and not _is_other(module, kind, pattern)
    if (forward := kernel_forward(module)) is not None:
        return row(None, False, refusals.served_by(forward), is_candidate)
    if isinstance(module, _OTHER_NORMS) and pattern is None:
        return row(None, False, refusals.NO_RMS_NORM, is_candidate)
    layer = pattern.layer_for(module) if pattern else None
    return row(layer, False, refusal(module, pattern) or refusals.not_swapped(), is_candidate)


def _remark(module: nn.Module) -> str | None:
    """Return what is not as fast as it could be in a module that is served."""
    pair = gate_up_layout.called(module)
    apart = gate_up_layout.why_apart(module) or (None if pair is None else lora.why_apart(*pair))
    return f"two products, since {apart}" if apart else gate_up_layout.unaligned(module) or experts.remark(module)


def _is_other(module: nn.Module, kind: Kind, reference: Pattern | None) -> bool:
    """Tell whether no kernel in use is meant for a module.

    It makes cos and sin, or routes, in another way, or no kernel was wanted for it. Of MLPs it is so for those that are
    only called so: what they multiply with is no pair of projections.
    """
    if reference is None:
        is_only_called_so = kind is catalogue.MLPS and not has_gated_projections(module)
        is_rare = kind in (catalogue.ROUTERS, catalogue.ACTIVATIONS, *_PARTLY_SERVED)
        return is_rare or is_only_called_so or module in registration.restored
    if refusals.unwanted(module, reference.repository) is not None:
        return True
    return kind in _PARTLY_SERVED and why_not_served(module, reference) is not None
