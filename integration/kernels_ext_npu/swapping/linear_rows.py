"""What there is to say of the linear layers of a model, plain ones and those with adapters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from kernels_ext_npu.catalogue import PROJECTIONS
from kernels_ext_npu.reasons import code_of
from kernels_ext_npu.swapping import adapters, ahead, projections, refusals, state
from kernels_ext_npu.swapping.protocol import Row


def rows(model: nn.Module) -> Iterator[Row]:
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
        fits = swapped and code_of(reason) != "changed"
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
