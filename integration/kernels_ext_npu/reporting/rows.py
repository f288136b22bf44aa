"""What there is to say of one module, or of one function that a module calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

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
from kernels_ext_npu.matching.classification import attends, attention_refusal, has_gated_projections, of_module
from kernels_ext_npu.matching.decorated import original_function
from kernels_ext_npu.matching.function_scan import Use, uses
from kernels_ext_npu.matching.lookup import find_function_pattern, find_pattern, why_not_served
from kernels_ext_npu.swapping import (
    adapters,
    ahead,
    attention_serving,
    changes,
    experts,
    experts_choice,
    experts_interface,
    functions,
    heads,
    loaded,
    packing,
    projections,
    refusals,
    state,
)
from kernels_ext_npu.swapping.attention_names import NAME
from kernels_ext_npu.swapping.forwards import kernel_forward
from kernels_ext_npu.swapping.refusals import decorates_own, refusal, replaced

# norms that are no RMS norms, so that no kernel could be missing for them
_OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.LocalResponseNorm)


@dataclass(frozen=True)
class Row:
    """One module, or one function that a module calls.

    Attributes:
        path: its name in the model; of a function that of the module, a dot, and the name in its file.
        class_name: its class, or the function.
        kernel: the layer that serves it or would serve it, None if there is none; of attention the name of the
            implementation.
        swapped: whether the kernel's forward is in place.
        reason: why not, or why not as fast as it could be; None if there is nothing to say.
        is_candidate: whether one would expect a kernel for it; not so for a LayerNorm, nor for frequencies that change,
            nor for what register(kernels=...) leaves out.
        kind: what it is, as the table counts it.
        function: the name of the function in its file, None for a module.
    """

    path: str
    class_name: str
    kernel: str | None
    swapped: bool
    reason: str | None
    is_candidate: bool = True
    kind: str = "norms"
    function: str | None = None

    @property
    def module(self) -> str:
        """The name in the model of the module, or of the module that calls the function."""
        return self.path if self.function is None else self.path[: -len(self.function)].rstrip(".")


def of_modules(model: nn.Module) -> Iterator[Row]:
    """Describe every module of a model that is of a kind that kernels serve, or that a kernel was swapped into."""
    for path, module in model.named_modules():
        kind = of_module(module) or KIND_OF_LAYER.get(loaded.layer_name(kernel_forward(module)) or "")
        if kind not in (None, ATTENTION):
            yield _of_module(path, module, kind)


def of_attention(model: nn.Module) -> Iterator[Row]:
    """Describe every module of a model that computes attention."""
    for path, module in model.named_modules():
        if attends(type(module)):
            yield _of_attention(path, module)


def of_heads(model: nn.Module) -> Iterator[Row]:
    """Describe every head of a language model that computes a loss from labels."""
    for head in heads.heads_of(model):
        name, reason = type(head.module).__name__, heads.refusal(head)
        if heads.is_swapped(head.module):
            fits, reason = (
                reason is None,
                heads.remark(head) if reason is None else refusals.changed(head.module, reason),
            )
            yield Row(head.path, name, heads.NAME, fits, reason, kind=HEADS.in_models)
        else:
            reason = reason or (refusals.NOT_REGISTERED if state.current is None else refusals.NOT_ASKED_FOR)
            yield Row(head.path, name, None, False, reason, is_candidate=False, kind=HEADS.in_models)


def of_projections(model: nn.Module) -> Iterator[Row]:
    """Describe every linear layer of a model, and every one with adapters in place of what it adapts.

    Those are left out whose weights a kernel reads for what they are part of.
    """
    adapted = list(adapters.adapted_of(model))
    with_adapters = {path for path, *_ in adapted}
    together = _called_together(model)
    for path, module, reason in (*adapted, *projections.projections_of(model)):
        if reason is not None and reason.startswith(projections.PART):
            continue
        kind = adapters if path in with_adapters else projections
        swapped = kind.LAYERS.is_swapped(module)
        if swapped and reason is None:
            reason = f"one node with {together[module]}" if module in together else None
            if kind is adapters and adapters.is_paused(module):
                reason = adapters.PAUSED
        elif swapped:
            reason = refusals.changed(module, reason or "")
        elif reason is None:
            reason = refusals.NOT_REGISTERED if state.current is None else refusals.NOT_ASKED_FOR
        fits = swapped and not (reason or "").startswith(refusals.CHANGED)
        name = kind.NAME if fits else None
        yield Row(path, type(module).__name__, name, fits, reason, is_candidate=False, kind=PROJECTIONS.in_models)


def _called_together(model: nn.Module) -> dict[nn.Module, str]:
    """Return the layers of a model that are one node with others, each with the names of all of these."""
    names = {module: path.rpartition(".")[2] for path, module in model.named_modules()}
    found: dict[nn.Module, str] = {}
    for module in names:
        members = ahead.members_of(module)
        found |= dict.fromkeys(members, ", ".join(names.get(member, "") for member in members))
    return found


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
            return Row(path, name, experts_interface.LAYER, False, refusals.changed(module, reason), kind=counted_as)
        reason = experts.remark(module) or f"called by its own forward, as {experts_choice.NAME}"
        return Row(path, name, experts_interface.LAYER, True, reason, kind=counted_as)
    reference = find_pattern(type(module))
    layer = reference.layer_for(module) if reference else None
    return Row(path, name, layer, False, _reason(module), candidate, counted_as)


def _adapted_apart(module: nn.Module) -> str | None:
    """Return why gate and up of a swapped MLP are two products where both have adapters; None if there is no reason."""
    pair = packing.called(module)
    return None if pair is None else adapters.apart(*pair)


def _of_attention(path: str, module: nn.Module) -> Row:
    name, counted_as = type(module).__name__, ATTENTION.in_models
    if (reason := attention_serving.refusal(module)) is not None:
        kernel = NAME if attention_refusal(type(module)) is None else None
        return Row(path, name, kernel, False, reason, is_candidate=False, kind=counted_as)
    stranger = replaced(module)
    reason = attention_serving.remark(module) if stranger is None else refusals.passed_by(stranger)
    return Row(path, name, NAME, True, reason, kind=counted_as)


def _of_function(path: str, module: nn.Module, use: Use) -> Row:
    reference, reason = find_function_pattern(use.function), functions.refusal(module, use)
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
    reference = find_pattern(type(module))
    if module in state.restored or (reference is not None and refusals.left_out(reference.repository) is not None):
        return True
    if kind in (ROUTERS, ACTIVATIONS):
        return reference is None
    if kind is MLPS:
        return reference is None and not has_gated_projections(module)
    return kind in (TABLES, LAYER_NORMS) and (reference is None or why_not_served(module, reference) is not None)


def _reason(module: nn.Module) -> str:
    if isinstance(module, _OTHER_NORMS) and find_pattern(type(module)) is None:
        return refusals.NO_RMS_NORM
    reason = refusal(module)
    if reason is not None:
        return reason
    return refusals.NOT_REGISTERED if state.current is None else refusals.NOT_ASKED_FOR
