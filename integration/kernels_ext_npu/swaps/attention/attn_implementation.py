"""Models that name our attention implementation: by its name, or by that of its repository on the Hub."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.distribution import sources
from kernels_ext_npu.swaps.attention import eligibility
from kernels_ext_npu.swaps.attention.eligibility import needs_mask_tensor

NAME = NPU_FLASH_ATTENTION.name
_ON_HUB = f"{sources.ORGANISATION}/{NPU_FLASH_ATTENTION.repository}"


def canonical_name(requested: Any) -> Any:
    """Return what was asked for, with our name wherever the repository on the Hub stands.

    Args:
        requested: a name; a dictionary of names, or of dictionaries, by sub-config; or None.
    """
    if isinstance(requested, dict):
        return {key: canonical_name(value) for key, value in requested.items()}
    repository, _, function = requested.partition(":") if isinstance(requested, str) else ("", "", "")
    is_on_hub = repository.partition("@")[0] == _ON_HUB and function in ("", "attention_forward")
    return NAME if is_on_hub else requested


def answer_import(original: Callable, implementation: str | None, *args: Any, **kwargs: Any) -> Any:
    """Import a flash attention, in place of transformers' ``lazy_import_flash_attention``: ours is in its table.

    DeepSpeed asks for names that have a slash in them: deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py.
    """
    return None if implementation in NPU_FLASH_ATTENTION.names else original(implementation, *args, **kwargs)


def take_out(models: list[PreTrainedModel], attending: list[nn.Module]) -> None:
    """Put back what configs named before ours, or else transformers' default.

    Args:
        models: outer ones before the models in them.
        attending: the modules in them that call attention by name.
    """
    for model in reversed(models):
        NPU_FLASH_ATTENTION.take_out(model.config, model.get_correct_attn_implementation(None))
    for config in {id(config): config for module in (*models, *attending) for config in _tree(module.config)}.values():
        NPU_FLASH_ATTENTION.take_out(config, "eager")  # which every part of a model has


def check_and_adjust(
    original: Callable, self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any
) -> str:
    """Return the implementation of a model, in place of its ``_check_and_adjust_attn_implementation``.

    Ours needs no package to be imported for it, and serves those models too that list the flash attentions that they
    get on with: none of these has a build for the NPU.
    """
    name = canonical_name(requested)
    if name not in NPU_FLASH_ATTENTION.names:
        found = original(self, requested, *args, **kwargs)
        if found != eligibility.EAGER:
            return found
        # the outer model passes what it has found to the models inside it
        kept = (eligibility.BY_DEFAULT, eligibility.RESTORED[eligibility.EAGER])
        by_default = requested is None or any(requested is each for each in kept)
        return eligibility.BY_DEFAULT if by_default else eligibility.ASKED
    default = original(self, None, *args, **kwargs)
    if not self._can_set_attn_implementation() or needs_mask_tensor(type(self.config)):
        warnings.warn(
            f"{NAME}: {type(self).__name__} does not call its attention by name, and keeps {default}", stacklevel=4
        )
        return default
    _enter_into_tables(type(self), default)
    for config in _tree(self.config):
        if (named := canonical_name(config._attn_implementation)) in NPU_FLASH_ATTENTION.names:
            NPU_FLASH_ATTENTION.set_in(config, default, named)
    return name


def set_implementation(
    original: Callable, self: PreTrainedModel, requested: str | dict, *args: Any, **kwargs: Any
) -> None:
    """Let a model name an implementation, in place of its ``set_attn_implementation``."""
    configs = [config for module in self.modules() for config in _tree(getattr(module, "config", None))]
    before = {id(config): (config, config._attn_implementation) for config in configs}  # one config is that of many
    try:
        original(self, canonical_name(requested), *args, **kwargs)
        top = requested.get("", None) if isinstance(requested, dict) else requested
        if top == eligibility.EAGER:  # transformers leaves alone what names it already
            self.config._attn_implementation_internal = eligibility.ASKED
        for config, implementation in before.values():
            named = config._attn_implementation
            if (
                named == eligibility.EAGER
                and named is not implementation
                and eligibility.EAGER in _all_names(requested)
            ):
                config._attn_implementation_internal = eligibility.ASKED
    finally:
        for config, implementation in before.values():
            if NPU_FLASH_ATTENTION.is_named_by(config) and implementation not in NPU_FLASH_ATTENTION.names:
                NPU_FLASH_ATTENTION.set_in(config, implementation, config._attn_implementation)


def _all_names(requested: Any) -> Iterator[Any]:
    """Yield every name that is asked for, of whatever part of a model."""
    if isinstance(requested, dict):
        for value in requested.values():
            yield from _all_names(value)
    else:
        yield requested


def _tree(config: Any) -> Iterator[PreTrainedConfig]:
    """Yield a config and its sub-configs; nothing where a module has none."""
    if isinstance(config, PreTrainedConfig):
        yield config
        for key in config.sub_configs:
            yield from _tree(getattr(config, key, None))


def _enter_into_tables(cls: type, default: str) -> None:
    """Add our names to dictionaries of attention classes in a modeling file, with the class of their default.

    For example, ``SAM_VISION_ATTENTION_CLASSES[config._attn_implementation]`` in transformers' modeling_sam.py; such
    classes do not look up ``ALL_ATTENTION_FUNCTIONS``.
    """
    assert registration.current is not None
    for name, table in vars(sys.modules[cls.__module__]).items():
        if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict) and NAME not in table and "eager" in table:
            for ours in NPU_FLASH_ATTENTION.names:
                registration.current.patches.item(table, ours, table.get(default, table["eager"]))
