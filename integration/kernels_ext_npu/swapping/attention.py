"""Modules of attention: which implementation they call, and what there is to say about them."""

from __future__ import annotations

import inspect
from types import FunctionType

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels_ext_npu.matching import kinds
from kernels_ext_npu.swapping import attention_choice, attention_interface, refusals, state
from kernels_ext_npu.swapping.devices import device_of, is_elsewhere

_CAPPED = "no operator of torch_npu caps scores"
_BIASED = "biases of positions are added to scores"


def restore(model: nn.Module) -> None:
    """Let a model that names our implementation have the one that it had before.

    One config is that of many modules: attention goes back for all of them.
    """
    attention_choice.give_back(
        [module for module in model.modules() if isinstance(module, PreTrainedModel) or calls_by_name(module)]
    )


def is_served(module: nn.Module) -> bool:
    """Tell whether the forward of a module of attention calls our implementation, by the name in its config."""
    if not attention_interface.is_installed() or not attention_choice.names_it(getattr(module, "config", None)):
        return False
    return calls_by_name(module)


def calls_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of a module calls the attention that its config names."""
    return kinds.calls_attention_by_name(type(module)) and isinstance(getattr(module, "config", None), PreTrainedConfig)


def refusal(module: nn.Module) -> str | None:
    """Return why the kernel would not do better than the implementation of a module; None where it does."""
    if any(parameter.dtype == torch.float64 for parameter in module.parameters()):
        return "it is in float64"
    return _not_fused(module) or kinds.attention_reason(type(module))


def remark(module: nn.Module) -> str | None:
    """Return why the kernel computes the attention of a module in torch, with all scores in memory."""
    if is_elsewhere(module):
        return f"in torch, since it is on {device_of(module)}"
    if any(parameter.dtype == torch.float64 for parameter in module.parameters()):
        return "in torch, since it is in float64"
    reason = _not_fused(module)
    return reason and f"in torch, {'where' if reason is _BIASED else 'since'} {reason}"


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
        return refusals.ATTENTION_UNNAMED
    return kept.get(id(module.config)) or refusals.NOT_SETTLED


def _not_fused(module: nn.Module) -> str | None:
    if getattr(module, "attn_logit_softcapping", None):
        return _CAPPED
    return _BIASED if _gives(inspect.unwrap(type(module).forward), "position_bias") else None


def _gives(forward: FunctionType, keyword: str) -> bool:
    """Tell whether a function gives an argument of a name to what it calls: such names are a tuple in its code."""
    return any(isinstance(constant, tuple) and keyword in constant for constant in forward.__code__.co_consts)
