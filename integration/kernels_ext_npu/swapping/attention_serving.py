"""What attention is served by itself: which classes, which masks are described for them, and what there is to say."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.attention_names import REPOSITORY, names_it
from kernels_ext_npu.swapping.devices import device_of, is_elsewhere

IS_OURS = "is_of_kernels_ext_npu"  # of functions that stand in for transformers' own
CAPPED = "no operator: scores are capped, which none of torch_npu does"
_PLAIN = "_kernels_ext_npu_plain_attention"  # of a module that restore() was called for


@torch.compiler.assume_constant_result
def serves(cls: type[nn.Module], config: type | None = None) -> bool:
    """Tell whether the kernel computes the attention of a class better than what it calls by name.

    Args:
        cls: the class of a module.
        config: that of its config, where it calls its own formula, as who chooses ``eager`` does.
    """
    return _refusal(cls) is None and (config is None or is_eager_by_default(config))


@torch.compiler.assume_constant_result
def describes(cls: type[PreTrainedConfig], name: str) -> bool:
    """Tell whether the masks of models with a config of a class are described.

    They are where modules only hand them on to attention that is served. In the files of models like Git others
    compute by themselves, and get the mask that they would have; so does who has chosen ``eager``.

    Args:
        cls: the class of a config.
        name: the implementation that the config names.
    """
    return (name != "eager" or is_eager_by_default(cls)) and _hands_on(cls)


@functools.cache
def is_eager_by_default(cls: type[PreTrainedConfig]) -> bool:
    """Tell whether transformers gives models with a config of a class their own formula where nobody names another."""
    models = _models_with(cls)
    return bool(models) and not any(model._supports_sdpa for model in models)


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


def calls_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of a module calls the attention that its config names."""
    from kernels_ext_npu.matching import kinds  # register() need not wait for references

    return kinds.calls_attention_by_name(type(module)) and isinstance(getattr(module, "config", None), PreTrainedConfig)


def stands_for(config: PreTrainedConfig) -> bool:
    """Tell whether the kernel stands for the implementation that a config names."""
    if not state.uses(REPOSITORY):
        return False
    name = config._attn_implementation
    return name == "sdpa" or (name == "eager" and is_eager_by_default(type(config)))


def has_replaced(config: PreTrainedConfig) -> bool:
    """Tell whether a config names ``sdpa``, and somebody has put another function into our place, which may call it."""
    return config._attn_implementation == "sdpa" and not hasattr(ALL_ATTENTION_FUNCTIONS["sdpa"], IS_OURS)


def refusal(module: nn.Module) -> str | None:
    """Return why the kernel does not compute the attention of a module; None where it does."""
    from kernels_ext_npu.matching import kinds
    from kernels_ext_npu.swapping import refusals

    if state.current is None:
        return refusals.NOT_REGISTERED
    if (left_out := refusals.left_out(REPOSITORY)) is not None:
        return left_out
    if not calls_by_name(module):
        return kinds.UNNAMED
    if names_it(module.config):
        return None
    if is_plain(module):
        return refusals.NOT_ASKED_FOR
    if not stands_for(module.config):
        return f"the attention implementation {module.config._attn_implementation} was asked for"
    if _is_in_float64(module):
        return "device limit: it is in float64"
    if caps(module):
        return CAPPED
    if (reason := _refusal(type(module))) is not None:
        return reason
    if is_elsewhere(module):
        return refusals.elsewhere(module)
    function: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    name = getattr(function, "__qualname__", type(function).__name__)
    replaced = f"another library has replaced the attention implementation sdpa: {function.__module__}.{name}"
    return replaced if has_replaced(module.config) else None


def remark(module: nn.Module) -> str | None:
    """Return why the kernel computes the attention of a module that names it in torch, with all scores in memory."""
    from kernels_ext_npu.matching import kinds

    if is_elsewhere(module):
        return f"in torch, since it is on {device_of(module)}"
    if _is_in_float64(module):
        return "in torch, since it is in float64"
    if kinds.adds_biases(type(module)):
        return f"in torch, where {kinds.why(kinds.BIASED)[1]}"
    return f"in torch, since {kinds.why(CAPPED)[1]}" if caps(module) else None


def caps(module: nn.Module) -> bool:
    """Tell whether a module of attention has a softcap."""
    return bool(getattr(module, "attn_logit_softcapping", None))


@functools.cache
def _refusal(cls: type[nn.Module]) -> str | None:
    from kernels_ext_npu.matching import kinds

    return kinds.attention_refusal(cls)


@functools.cache
def _hands_on(cls: type[PreTrainedConfig]) -> bool:
    """Tell whether all attention in the files of the models with a config of a class is served."""
    from kernels_ext_npu.matching import kinds

    files = {model.__module__ for model in _models_with(cls)}
    classes = [value for file in files for value in vars(sys.modules[file]).values() if isinstance(value, type)]
    attending = [value for value in classes if issubclass(value, nn.Module) and kinds.attends(value)]
    return bool(attending) and not any(map(kinds.attends_by_itself, attending)) and None in map(_refusal, attending)


def _models_with(cls: type[PreTrainedConfig]) -> list[type[PreTrainedModel]]:
    """Return the classes of models that have a config of a class, or of the next one that it inherits from."""
    known = _all_models(PreTrainedModel)
    found = ([model for model in known if model.config_class is base] for base in cls.__mro__[:-1])
    return next((models for models in found if models), [])


def _all_models(cls: type[PreTrainedModel]) -> list[type[PreTrainedModel]]:
    return [each for model in cls.__subclasses__() for each in (model, *_all_models(model))]


def _is_in_float64(module: nn.Module) -> bool:
    return any(parameter.dtype == torch.float64 for parameter in module.parameters())
