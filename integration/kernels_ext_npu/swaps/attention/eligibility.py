"""Which attention the kernel computes, decided from classes, modules and configs."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.matching import classification
from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.swaps import refusals

Answer = TypeVar("Answer")

KERNEL_DISABLED = "_kernels_ext_npu_plain_attention"  # an attribute that restore() sets on modules
# Who chose the name in a config is told by the identity of the string, since equality, saved files and other readers of
# configs must see no difference. ``name is BY_DEFAULT``: transformers chose it. ``name is ASKED``: the user named it.
# ``name is RESTORED[name]``: restore() was called, and the model makes its masks as transformers does. Copies of a
# config keep the string; a pickle holds an ordinary one.
EAGER = "eager"
BY_DEFAULT, ASKED = ("".join(EAGER) for _ in range(2))
RESTORED = {name: "".join(name) for name in (EAGER, "sdpa")}
ELSEWHERE = Reason("elsewhere", "it is on another device")
CAPPED = Reason("no operator", "no operator: scores are capped, which none of torch_npu does")
IN_FLOAT64 = Reason("device limit", "device limit: it is in float64")


def _cached_by_class(question: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """Cache a function of a class; torch.compile takes its result as a constant."""
    known = functools.cache(question)

    @torch.compiler.assume_constant_result
    @functools.wraps(question)
    def answer(cls: type) -> Answer:
        return known(cls)

    return answer


class_refusal = _cached_by_class(classification.attention_refusal)


@_cached_by_class
def is_eager_by_default(cls: type) -> bool:
    """Tell whether transformers chooses ``eager`` by default for models with this class of config."""
    models = _models_with(cls)
    return bool(models) and not any(model._supports_sdpa for model in models)


@_cached_by_class
def has_served_attention(cls: type) -> bool:
    """Tell whether the kernel can compute the attention of any class in models with this class of config."""
    return None in map(class_refusal, _attending(cls))


@_cached_by_class
def needs_mask_tensor(cls: type) -> bool:
    """Tell whether another attention class of a model reads the model's mask itself, and so needs a tensor.

    Git is such a model. Classes in the same file that belong to models with another config, such as the audio encoders
    of Gemma 3n and 4, do not count: they get other masks.
    """
    parts = chain.from_iterable(map(_parts, _models_with(cls)))
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
    return limit(module, dtype, softcap) or (None if device in ("npu", None) else ELSEWHERE)


def serves_config(config: PreTrainedConfig) -> bool:
    """Tell whether the kernel takes the place of what a config names: ``sdpa``, or ``eager`` as in `serves_eager`."""
    is_registered = NPU_FLASH_ATTENTION.is_registered()
    return is_registered and (config._attn_implementation == "sdpa" or serves_eager(config))


def serves_eager(config: PreTrainedConfig) -> bool:
    """Tell whether the kernel takes the place of ``eager``, which transformers chose for a model without sdpa."""
    name = config._attn_implementation
    return name == EAGER and name is not ASKED and is_eager_by_default(type(config))


def note_restored(config: PreTrainedConfig) -> None:
    """Note in a config that restore() was called: its models make their masks as transformers does."""
    name = config._attn_implementation
    if name is not ASKED and name in RESTORED:
        config._attn_implementation_internal = RESTORED[name]


def forget_restored(config: PreTrainedConfig) -> None:
    """Take back what `note_restored` noted: masks are described for the kernel again."""
    name = config._attn_implementation
    if name in RESTORED and name is RESTORED[name]:
        config._attn_implementation_internal = BY_DEFAULT if name == EAGER else "sdpa"


def uses_kernel(config: Any) -> bool:
    """Tell whether the kernel computes the attention that a config names: under its own name, or for sdpa or eager."""
    return NPU_FLASH_ATTENTION.is_named_by(config) or (serves_config(config) and foreign_sdpa(config) is None)


def takes_mask_description(config: Any) -> bool:
    """Tell whether models with this config may receive a description in place of a mask tensor."""
    if not isinstance(config, PreTrainedConfig) or not serves_config(config):
        return False
    name = config._attn_implementation
    if name is RESTORED.get(name):
        return False
    return has_served_attention(type(config)) and not needs_mask_tensor(type(config))


def foreign_sdpa(config: PreTrainedConfig) -> str | None:
    """Return the name of a function of another library that is registered as ``sdpa``; None if there is none."""
    function: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]
    function = getattr(function, "func", function)  # ours is a functools.partial
    if config._attn_implementation != "sdpa" or function.__module__.startswith(f"{__package__}."):
        return None
    return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"


def _attending(cls: type) -> list[type[nn.Module]]:
    """Return the attention classes in the modeling files of models with this class of config."""
    files = {model.__module__ for model in _models_with(cls)}
    classes = [value for file in files for value in vars(sys.modules[file]).values() if isinstance(value, type)]
    return [value for value in classes if issubclass(value, nn.Module) and classification.attends(value)]


def _parts(cls: type[nn.Module]) -> frozenset[type[nn.Module]]:
    """Return a class and all module classes that its methods name, directly or through each other."""
    found, waiting = {cls}, [cls]
    for each in waiting:  # grows while it runs
        for named in _named_in(each) - found:
            found.add(named)
            waiting.append(named)
    return frozenset(found)


def _named_in(cls: type[nn.Module]) -> set[type[nn.Module]]:
    """Return the module classes that the methods of a class and of its bases name, also in dictionaries.

    ``_init_weights`` is left out: it names every class of the file.
    """
    bases = [base for base in cls.__mro__ if base is not PreTrainedModel and not base.__module__.startswith("torch.")]
    own = [(name, value) for base in bases for name, value in vars(base).items() if name != "_init_weights"]
    functions = [value for _, value in own if inspect.isfunction(value) and not value.__module__.startswith("torch.")]
    values = [
        function.__globals__.get(name) for function in functions for name in classification.referenced_names(function)
    ]
    tables = [list(value.values()) for value in values if isinstance(value, dict)]
    return {value for value in (*values, *chain.from_iterable(tables)) if _is_module_class(value)}


def _is_module_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module) and not issubclass(value, PreTrainedModel)


def _models_with(cls: type) -> list[type[PreTrainedModel]]:
    """Return the model classes whose ``config_class`` is this class, or else its nearest base that has any."""
    known = _all_models(PreTrainedModel)
    found = ([model for model in known if model.config_class is base] for base in cls.__mro__[:-1])
    return next((models for models in found if models), [])


def _all_models(cls: type[PreTrainedModel]) -> list[type[PreTrainedModel]]:
    return [each for model in cls.__subclasses__() for each in (model, *_all_models(model))]
