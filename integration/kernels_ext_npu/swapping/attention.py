"""Modules of attention: which implementation they call, and what there is to say about them."""

from __future__ import annotations

import inspect
from types import FunctionType

import torch
from torch import nn
from transformers import PreTrainedModel

from kernels_ext_npu.matching import kinds
from kernels_ext_npu.swapping import attention_choice, attention_interface
from kernels_ext_npu.swapping.devices import device_of, is_elsewhere

_CALLS = {"ALL_ATTENTION_FUNCTIONS", "get_interface", "_attn_implementation"}


def restore(model: nn.Module) -> None:
    """Let a model that names our implementation have the one that it had before.

    One config is that of many modules: attention goes back for all of them.
    """
    attention_choice.give_back(
        [module for module in model.modules() if isinstance(module, PreTrainedModel) or _calls_by_name(module)]
    )


def is_called_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of a module of attention calls our implementation, by the name in its config."""
    if not attention_interface.is_installed() or not attention_choice.names_it(getattr(module, "config", None)):
        return False
    return _calls_by_name(module)


def remark(module: nn.Module) -> str | None:
    """Return why the kernel computes the attention of a module in torch, with all scores in memory."""
    if is_elsewhere(module):
        return f"in torch, since it is on {device_of(module)}"
    if any(parameter.dtype == torch.float64 for parameter in module.parameters()):
        return "in torch, since it is in float64"
    if getattr(module, "attn_logit_softcapping", None):
        return "in torch, since no operator of torch_npu caps scores"
    if _gives(inspect.unwrap(type(module).forward), "position_bias"):
        return "in torch, where biases of positions are added to scores"
    return None


def _calls_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of a module calls the attention that its config names."""
    forward = inspect.unwrap(type(module).forward)
    return inspect.isfunction(forward) and kinds.names(forward) >= _CALLS


def _gives(forward: FunctionType, keyword: str) -> bool:
    """Tell whether a function gives an argument of a name to what it calls: such names are a tuple in its code."""
    return any(isinstance(constant, tuple) and keyword in constant for constant in forward.__code__.co_consts)
