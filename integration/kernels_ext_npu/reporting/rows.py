"""What there is to say of one module, or of one function that a module calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from kernels_ext_npu.catalogue import (
    ACTIVATIONS,
    ATTENTION,
    HEADS,
    KIND_OF_LAYER,
    LAYER_NORMS,
    LAYERS,
    MLPS,
    PROJECTIONS,
    ROUTERS,
    TABLES,
    Kind,
)
from kernels_ext_npu.matching.kinds import has_gated_projections, of_module
from kernels_ext_npu.matching.lookup import find_function_reference, find_reference
from kernels_ext_npu.references.fingerprints import original_function
from kernels_ext_npu.swapping import (
    adapters,
    changes,
    functions,
    loaded,
    packing,
    refusals,
    state,
)
from kernels_ext_npu.swapping.experts import serving as experts
from kernels_ext_npu.swapping.forwards import kernel_forward
from kernels_ext_npu.swapping.function_uses import Use, uses
from kernels_ext_npu.swapping.named_implementation import NPU_GROUPED_MM
from kernels_ext_npu.swapping.protocol import Row
from kernels_ext_npu.swapping.refusals import decorates_own, refusal, replaced

# norms that are no RMS norms, so that no kernel could be missing for them
_OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)


def of_modules(model: nn.Module) -> Iterator[Row]:
    """Describe every module of a model that is of a kind that kernels serve, or that a kernel was swapped into."""
    for path, module in model.named_modules():
        kind = of_module(module) or KIND_OF_LAYER.get(loaded.layer_name(kernel_forward(module)) or "")
        if kind not in (None, ATTENTION):
            yield _of_module(path, module, kind)


def of_functions(model: nn.Module) -> Iterator[Row]:
    """Describe every function that a kernel may serve and a module of a model calls, once for each module."""
    for path, module in model.named_modules():
        for use in uses(type(module)):
            yield _of_function(path, module, use)


def passed_by(row: Row, model: nn.Module) -> Row:
    """Add a remark where another library may compute without calling what was swapped."""
    if not row.swapped or not row.path:
        return row
    around = model.get_submodule(row.path.rpartition(".")[0])
    stranger = None if decorates_own(around) else replaced(around)
    return row if stranger is None else replace(row, reason=refusals.passed_by(stranger))


def expected(row: Row, model: nn.Module) -> Row:
    """Replace a reason that will pass by itself when the model is first called, where that is all there is."""
    if row.kind == ATTENTION.in_models:
        passes = refusals.is_elsewhere(model.get_submodule(row.path))
        return replace(row, reason=refusals.AT_FIRST_CALL) if row.kernel and not row.swapped and passes else row
    if row.kind in (HEADS.in_models, PROJECTIONS.in_models):
        passes = row.reason in (refusals.NOT_ASKED_FOR, refusals.elsewhere(model.get_submodule(row.path)))
        return replace(row, reason=refusals.AT_FIRST_CALL) if passes else row
    if row.swapped or row.kernel is None or refusals.left_out(LAYERS[row.kernel]) is not None:
        return row
    if row.function is None:
        module = model.get_submodule(row.path)
        if not refusals.is_elsewhere(module) and refusal(module) is not None:
            return row
    return replace(row, reason=refusals.AT_FIRST_CALL)


def _of_module(path: str, module: nn.Module, kind: Kind) -> Row:
    name, counted_as = type(module).__name__, kind.in_models
    forward = kernel_forward(module)
    if forward is not None and (layer := loaded.layer_name(forward)) is not None:
        if (reason := changes.since_swapped(module)) is not None:
            return Row(path, name, layer, False, refusals.changed(module, reason), kind=counted_as)
        apart = packing.separate(module) or _adapted_apart(module)
        reason = f"two products, since {apart}" if apart else packing.unaligned(module) or experts.remark(module)
        return Row(path, name, layer, True, reason, kind=counted_as)
    candidate = not isinstance(module, _OTHER_NORMS) and not _is_other(module, kind)
    if forward is not None:
        return Row(path, name, None, False, refusals.served_by(forward), candidate, counted_as)
    if experts.is_called_by_name(module):
        if (reason := changes.since_swapped(module)) is not None:
            return Row(path, name, experts.LAYER, False, refusals.changed(module, reason), kind=counted_as)
        reason = experts.remark(module) or f"called by its own forward, as {NPU_GROUPED_MM.name}"
        return Row(path, name, experts.LAYER, True, reason, kind=counted_as)
    reference = find_reference(type(module))
    layer = reference.layer(module) if reference else None
    return Row(path, name, layer, False, _reason(module), candidate, counted_as)


def _adapted_apart(module: nn.Module) -> str | None:
    """Return why gate and up of a swapped MLP are two products where both have adapters; None if there is no reason."""
    pair = packing.called(module)
    return None if pair is None else adapters.apart(*pair)


def _of_function(path: str, module: nn.Module, use: Use) -> Row:
    reference, reason = find_function_reference(use.function), functions.refusal(module, use)
    return Row(
        path=f"{path}.{use.name}".lstrip("."),
        class_name=getattr(original_function(use.function), "__qualname__", use.name),
        kernel=reference.layer if reference else None,
        swapped=reason is None,
        reason=reason,
        is_candidate=functions.is_candidate(use),
        kind=use.kind.in_models,
        function=use.name,
    )


def _is_other(module: nn.Module, kind: Kind) -> bool:
    """Tell whether no kernel in use is meant for a module.

    It makes cos and sin, or routes, in another way, or no kernel was wanted for it. Of MLPs it is so for those that are
    only called so: what they multiply with is no pair of projections.
    """
    reference = find_reference(type(module))
    if module in state.restored or (reference is not None and refusals.left_out(reference.repository) is not None):
        return True
    if kind in (ROUTERS, ACTIVATIONS):
        return reference is None
    if kind is MLPS:
        return reference is None and not has_gated_projections(module)
    return kind in (TABLES, LAYER_NORMS) and (reference is None or reference.refuse(module) is not None)


def _reason(module: nn.Module) -> str:
    if isinstance(module, _OTHER_NORMS) and find_reference(type(module)) is None:
        return refusals.NO_RMS_NORM
    reason = refusal(module)
    if reason is not None:
        return reason
    return refusals.NOT_REGISTERED if state.current is None else refusals.NOT_ASKED_FOR
