"""What classes tell of attention: which is served, and for which models masks are described."""

from __future__ import annotations

import functools
import sys

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel


@torch.compiler.assume_constant_result
def serves(cls: type, config: type | None = None) -> bool:
    """Tell whether the kernel computes the attention of a class better than what it calls by name.

    Args:
        cls: the class of a module.
        config: that of its config, where it calls its own formula, as who chooses ``eager`` does.
    """
    return refusal_of(cls) is None and (config is None or is_eager_by_default(config))


@torch.compiler.assume_constant_result
def describes(cls: type, name: str) -> bool:
    """Tell whether the masks of models with a config of a class are described.

    They are where modules only hand them on to attention that is served. In the files of models like Git others
    compute by themselves, and get the mask that they would have; so does who has chosen ``eager``.

    Args:
        cls: the class of a config.
        name: the implementation that the config names.
    """
    if (name == "eager" and not is_eager_by_default(cls)) or is_added_elsewhere(cls):
        return False
    return None in map(refusal_of, _attending(cls))  # type: ignore[arg-type]


@torch.compiler.assume_constant_result
def is_eager_by_default(cls: type) -> bool:
    """Tell whether transformers gives models with a config of a class their own formula where nobody names another."""
    return _has_no_sdpa(cls)


def calls_by_name(module: nn.Module) -> bool:
    """Tell whether the forward of a module calls the attention that its config names."""
    from kernels_ext_npu.matching import classification  # register() need not wait for patterns

    return classification.calls_attention_by_name(type(module)) and isinstance(
        getattr(module, "config", None), PreTrainedConfig
    )


@functools.cache
def is_added_elsewhere(cls: type) -> bool:
    """Tell whether the mask of a model with a config of a class is for others, too, which compute by themselves."""
    from kernels_ext_npu.matching import classification

    return any(map(classification.attends_by_itself, _attending(cls)))


@functools.cache
def _has_no_sdpa(cls: type) -> bool:
    models = _models_with(cls)
    return bool(models) and not any(model._supports_sdpa for model in models)


@functools.cache
def _hands_on(cls: type) -> bool:
    return not is_added_elsewhere(cls) and any(refusal_of(each) is None for each in _attending(cls))  # type: ignore[arg-type]


@functools.cache
def refusal_of(cls: type) -> str | None:
    """Return why our attention does not take the place of that of a class; None where it does."""
    from kernels_ext_npu.matching import classification

    return classification.attention_refusal(cls)


def _attending(cls: type) -> list[type[nn.Module]]:
    """Return the classes that attend in the files of the models with a config of a class."""
    from kernels_ext_npu.matching import classification

    files = {model.__module__ for model in _models_with(cls)}
    classes = [value for file in files for value in vars(sys.modules[file]).values() if isinstance(value, type)]
    return [value for value in classes if issubclass(value, nn.Module) and classification.attends(value)]


def _models_with(cls: type) -> list[type[PreTrainedModel]]:
    """Return the classes of models that have a config of a class, or of the next one that it inherits from."""
    known = _all_models(PreTrainedModel)
    found = ([model for model in known if model.config_class is base] for base in cls.__mro__[:-1])
    return next((models for models in found if models), [])


def _all_models(cls: type[PreTrainedModel]) -> list[type[PreTrainedModel]]:
    return [each for model in cls.__subclasses__() for each in (model, *_all_models(model))]
