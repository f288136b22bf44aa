"""Modules of attention: which implementation they call, and what there is to say about them."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from kernels_ext_npu.matching import kinds
from kernels_ext_npu.swapping import attention_choice, attention_default, refusals, state
from kernels_ext_npu.swapping.attention_modules import CAPPED, calls_by_name, caps, is_in_float64
from kernels_ext_npu.swapping.devices import device_of, is_elsewhere


def restore(model: nn.Module) -> None:
    """Let a model that names our implementation have the one that it had before.

    One config is that of many modules: attention goes back for all of them.
    """
    attention_choice.give_back(
        [module for module in model.modules() if isinstance(module, PreTrainedModel) or calls_by_name(module)]
    )


def is_served(module: nn.Module) -> bool:
    """Tell whether the forward of a module of attention calls our implementation, by the name in its config."""
    if not attention_default.is_installed() or not attention_choice.names_it(getattr(module, "config", None)):
        return False
    return calls_by_name(module)


def remark(module: nn.Module) -> str | None:
    """Return why the kernel computes the attention of a module in torch, with all scores in memory."""
    if is_elsewhere(module):
        return f"in torch, since it is on {device_of(module)}"
    if is_in_float64(module):
        return "in torch, since it is in float64"
    if kinds.adds_biases(type(module)):
        return f"in torch, where {_without_sort(kinds.BIASED)}"
    return f"in torch, since {_without_sort(CAPPED)}" if caps(module) else None


def reason(module: nn.Module, kept: dict[int, str | None]) -> str:
    """Return why the kernel does not compute the attention of a module.

    Args:
        module: one whose config does not name ours.
        kept: what attention_default.reasons() says of its model.
    """
    if state.current is None:
        return refusals.NOT_REGISTERED
    if (left_out := refusals.left_out(attention_choice.REPOSITORY)) is not None:
        return left_out
    if not calls_by_name(module):
        return kinds.UNNAMED
    return kept.get(id(module.config)) or refusals.NOT_SETTLED


def _without_sort(reason: str) -> str:
    return kinds.why(reason)[1]
