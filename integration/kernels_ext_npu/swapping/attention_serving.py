"""Modules of attention: which the kernel computes, and what there is to say about them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.attention_classes import calls_by_name, is_eager_by_default, refusal_of
from kernels_ext_npu.swapping.attention_names import REPOSITORY, names_it
from kernels_ext_npu.swapping.devices import device_of, is_elsewhere

_INTERFACE = f"{__package__}.attention_interface"
_PLAIN = "_kernels_ext_npu_plain_attention"  # of a module that restore() was called for


def set_plain(model: nn.Module, is_plain: bool) -> None:
    """Let the modules of a model that call attention by name compute without the kernel, or with it again."""
    for module in model.modules():
        if calls_by_name(module):
            if is_plain or module in state.restored:
                setattr(module, _PLAIN, True)
            else:
                vars(module).pop(_PLAIN, None)


def is_plain(module: nn.Module) -> bool:
    """Tell whether restore() was called for the attention of a module."""
    return _PLAIN in module.__dict__


def stands_for(config: PreTrainedConfig) -> bool:
    """Tell whether the kernel stands for the implementation that a config names."""
    if not state.uses(REPOSITORY):
        return False
    name = config._attn_implementation
    return name == "sdpa" or (name == "eager" and is_eager_by_default(type(config)))  # type: ignore[arg-type]


def has_replaced(config: PreTrainedConfig) -> bool:
    """Tell whether a config names ``sdpa``, and somebody has put another function into our place, which may call it."""
    function = getattr(ALL_ATTENTION_FUNCTIONS["sdpa"], "func", None)  # of a partial
    return config._attn_implementation == "sdpa" and getattr(function, "__module__", None) != _INTERFACE


def refusal(module: Any) -> str | None:
    """Return why the kernel does not compute the attention of a module; None where it does."""
    from kernels_ext_npu.matching import classification
    from kernels_ext_npu.swapping import refusals

    if state.current is None:
        return refusals.NOT_REGISTERED
    if (left_out := refusals.left_out(REPOSITORY)) is not None:
        return left_out
    if not calls_by_name(module):
        return classification.UNNAMED
    if names_it(module.config):
        return None
    if is_plain(module):
        return refusals.NOT_ASKED_FOR
    if not stands_for(module.config):
        return f"the attention implementation {module.config._attn_implementation} was asked for"
    if _is_in_float64(module):
        return "device limit: it is in float64"
    if caps(module):
        return classification.CAPPED
    if (reason := refusal_of(type(module))) is not None:  # type: ignore[arg-type]
        return reason
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    function: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    name = getattr(function, "__qualname__", type(function).__name__)
    replaced = f"another library has replaced the attention implementation sdpa: {function.__module__}.{name}"
    return replaced if has_replaced(module.config) else None


def remark(module: nn.Module) -> str | None:
    """Return why the kernel computes the attention of a module that names it in torch, with all scores in memory."""
    from kernels_ext_npu.matching import classification

    if is_elsewhere(module):
        return f"in torch, since it is on {device_of(module)}"
    if _is_in_float64(module):
        return "in torch, since it is in float64"
    if classification.adds_biases(type(module)):
        return f"in torch, where {classification.text_of(classification.BIASED)}"
    return f"in torch, since {classification.text_of(classification.CAPPED)}" if caps(module) else None


def caps(module: nn.Module) -> bool:
    """Tell whether a module of attention has a softcap."""
    return bool(getattr(module, "attn_logit_softcapping", None))


def _is_in_float64(module: nn.Module) -> bool:
    return any(parameter.dtype == torch.float64 for parameter in module.parameters())
