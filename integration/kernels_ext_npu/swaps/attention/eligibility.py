"""Which attention the kernel computes, decided from classes, modules and configs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.flex_attention import FLEX_ATTENTION
from kernels_ext_npu.matching import classification
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import refusals

Answer = TypeVar("Answer")

KERNEL_DISABLED = "_kernels_ext_npu_plain_attention"  # an attribute that restore() sets on modules
# Who chose the name in a config is told by the identity of the string, since equality, saved files and other readers of
# configs must see no difference. ``name is BY_DEFAULT``: transformers chose it. ``name is ASKED``: the user named it.
# ``name is RESTORED[name]``: restore() was called, and the model makes its masks as transformers does. Copies of a
# config keep the string; a pickle holds an ordinary one.
EAGER, FLEX = "eager", FLEX_ATTENTION
BY_DEFAULT, ASKED = ("".join(EAGER) for _ in range(2))
RESTORED = {name: "".join(name) for name in (EAGER, "sdpa", FLEX)}
ELSEWHERE = Reason("elsewhere", "it is on another device")
CAPPED = Reason("no operator", "no operator: scores are capped, which none of torch_npu does")
IN_FLOAT64 = Reason("device limit", "device limit: it is in float64")


def _once_a_class(question: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """Cache a function of a class; torch.compile takes its result as a constant."""
    known = functools.cache(question)
    return torch.compiler.assume_constant_result(functools.wraps(question)(lambda cls: known(cls)))


class_refusal = _once_a_class(classification.attention_refusal)


@_once_a_class
def is_eager_by_default(cls: type) -> bool:
    """Tell whether transformers chooses ``eager`` by default for models with this class of config."""
    models = _models_with(cls)
    return bool(models) and not any(model._supports_sdpa for model in models)


@_once_a_class
def has_served_attention(cls: type) -> bool:
    """Tell whether the kernel can compute the attention of any class in models with this class of config."""
    files = [vars(sys.modules[model.__module__]).values() for model in _models_with(cls)]
    return any(class_refusal(value) is None for file in files for value in file if _is_module_class(value))


@_once_a_class
def needs_mask_tensor(cls: type) -> bool:
    """Tell whether another attention class of a model reads the model's mask itself, and so needs a tensor.

    Git is such a model. Classes in the same file that belong to models with another config, such as the audio encoders
    of Gemma 3n and 4, do not count: they get other masks.
    """
    parts: list[type[nn.Module]] = [*_models_with(cls)]
    for part in parts:  # grows while it runs
        parts += _named_in(part).difference(parts)
    return any(map(classification.attends_by_itself, parts))


def calls_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of a module calls the attention that its config names."""
    has_config = isinstance(getattr(module, "config", None), PreTrainedConfig)
    return has_config and classification.calls_attention_by_name(type(module))


def limit(module: nn.Module, dtype: torch.dtype, softcap: Any) -> Reason | None:
    """Return why no operator computes the attention of a module with this dtype and softcap; None if one does."""
    if dtype is torch.float64:
        return IN_FLOAT64
    return CAPPED if softcap else class_refusal(type(module))


def refusal(module: nn.Module, device: str | None, dtype: torch.dtype, softcap: Any) -> Reason | None:
    """Return why the kernel does not compute the attention of a module here; None where it does."""
    if KERNEL_DISABLED in module.__dict__:
        return refusals.NOT_ASKED_FOR
    reason = limit(module, dtype, softcap)
    # flex_attention has nothing better: what no operator computes is computed in torch
    if reason is not None and not names_flex(getattr(module, "config", None)):
        return reason
    return None if device in ("npu", None) else ELSEWHERE


def serves_config(config: PreTrainedConfig) -> bool:
    """Tell whether the kernel takes the place of what a config names: ``sdpa``, or ``eager`` that nobody asked for."""
    name = config._attn_implementation
    is_unasked = name == EAGER and name is not ASKED and is_eager_by_default(type(config))
    return NPU_FLASH_ATTENTION.is_registered() and (name == "sdpa" or is_unasked)


def note_restored(config: PreTrainedConfig) -> None:
    """Note in a config that restore() was called: its models make their masks as transformers does."""
    name = config._attn_implementation
    if name is not ASKED and name in RESTORED:
        config._attn_implementation_internal = RESTORED[name]


def forget_restored(config: PreTrainedConfig) -> None:
    """Take back what `note_restored` noted: masks are described for the kernel again."""
    name = config._attn_implementation
    if name in RESTORED and name is RESTORED[name]:
        config._attn_implementation_internal = {EAGER: BY_DEFAULT, FLEX: FLEX}.get(name, "sdpa")


def names_flex(config: Any) -> bool:
    """Tell whether a config names ``flex_attention``, and the function of that name is ours."""
    return getattr(config, "_attn_implementation", None) == FLEX and _is_ours(ALL_ATTENTION_FUNCTIONS[FLEX])


def uses_kernel(config: Any) -> bool:
    """Tell whether the kernel computes the attention that a config names: under its own name, or for sdpa or eager."""
    return NPU_FLASH_ATTENTION.is_named_by(config) or (serves_config(config) and foreign_sdpa(config) is None)


def takes_mask_description(config: Any) -> bool:
    """Tell whether models with this config may receive a description in place of a mask tensor."""
    if not isinstance(config, PreTrainedConfig) or not (serves_config(config) or names_flex(config)):
        return False
    name, cls = config._attn_implementation, type(config)
    if name == FLEX:
        return name is not RESTORED[FLEX] and not needs_mask_tensor(cls)
    is_original = ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward  # somebody has put it back
    return not is_original and name is not RESTORED[name] and has_served_attention(cls) and not needs_mask_tensor(cls)


def foreign_sdpa(config: PreTrainedConfig) -> str | None:
    """Return the name of a function of another library that is registered as ``sdpa``; None if there is none."""
    function: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    if config._attn_implementation != "sdpa" or _is_ours(function):
        return None
    function = getattr(function, "func", function)
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def _is_ours(function: Any) -> bool:
    """Tell whether a function in transformers' table is ours, a functools.partial."""
    return getattr(function, "func", function).__module__.startswith(f"{__package__}.")


def _named_in(cls: type[nn.Module]) -> set[type[nn.Module]]:
    """Return the module classes that methods name, also in dictionaries; ``_init_weights`` names all of a file."""
    methods = [value for base in cls.__mro__ for name, value in vars(base).items() if name != "_init_weights"]
    values = [method.__globals__.get(name) for method in methods for name in classification.referenced_names(method)]
    values += [each for value in values if isinstance(value, dict) for each in value.values()]
    return {value for value in values if _is_module_class(value)}


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and not issubclass(value, PreTrainedModel)


def _models_with(cls: type) -> list[type[PreTrainedModel]]:
    """Return the model classes whose ``config_class`` is this class, or else its nearest base that has any."""
    models = [PreTrainedModel]
    for model in models:  # grows while it runs
        models += model.__subclasses__()
    found = ([model for model in models if model.config_class is base] for base in cls.__mro__[:-1])
    return next(filter(None, found), [])
