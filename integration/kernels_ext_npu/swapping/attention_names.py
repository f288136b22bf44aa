"""Models that name our attention implementation: by its name, or by that of its repository on the Hub."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels_ext_npu import sources
from kernels_ext_npu.catalogue import IMPLEMENTATION as NAME
from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.attention_classes import calls_by_name, is_added_elsewhere
from kernels_ext_npu.swapping.patches import Patches

REPOSITORY = "FlashAttention"
ON_HUB = f"{sources.ORGANISATION}/{REPOSITORY}"
_FIELD = "_attn_implementation_internal"  # what the property `_attn_implementation` of configs reads
_TABLES = "_ATTENTION_CLASSES"  # how the files of models call a dictionary of classes by implementation


def install(patches: Patches) -> None:
    """Let models take the name, and nothing be asked of them that flash attentions need."""
    patches.method(PreTrainedModel, "_check_and_adjust_attn_implementation", _check_and_adjust, _is_installed)
    patches.method(PreTrainedModel, "set_attn_implementation", _set, _is_installed)


def canonical_name(requested: Any) -> Any:
    """Return what was asked for, with our name wherever it or the repository on the Hub stands.

    Args:
        requested: a name; a dictionary of names, or of dictionaries, by sub-config; or None.
    """
    if isinstance(requested, dict):
        return {key: canonical_name(value) for key, value in requested.items()}
    is_ours = isinstance(requested, str) and (requested == NAME or requested.partition("@")[0] == ON_HUB)
    return NAME if is_ours else requested


def names_it(config: Any) -> bool:
    """Tell whether a config names our implementation."""
    return isinstance(config, PreTrainedConfig) and config._attn_implementation == NAME


def give_back(model: nn.Module) -> None:
    """Give the configs of a model that name ours what they named before, or what transformers gives by itself."""
    modules = [module for module in model.modules() if isinstance(module, PreTrainedModel) or calls_by_name(module)]
    defaults = {
        id(module.config): module.get_correct_attn_implementation(None)
        for module in modules
        if isinstance(module, PreTrainedModel)
    }
    for config in _configs_of(modules):
        if names_it(config):
            if state.current is not None:
                state.current.patches.give_back(config, _FIELD)
            if names_it(config):  # a copy; of a part without its model: every model has "eager"
                setattr(config, _FIELD, defaults.get(id(config), next(iter(defaults.values()), "eager")))


def _is_installed() -> bool:
    return state.uses(REPOSITORY)


def _check_and_adjust(
    original: Callable, self: PreTrainedModel, requested: str | None, *args: Any, **kwargs: Any
) -> str:
    """Return the implementation of a model.

    Ours needs no package to be imported for it, and serves those models too that list the flash attentions that they
    get on with: none of these has a build for the NPU.
    """
    if canonical_name(requested) != NAME:
        return original(self, requested, *args, **kwargs)
    default = original(self, None, *args, **kwargs)
    if not self._can_set_attn_implementation() or is_added_elsewhere(type(self.config)):  # type: ignore[arg-type]
        warnings.warn(
            f"{NAME}: {type(self).__name__} does not call its attention by name, and keeps {default}", stacklevel=4
        )
        return default
    _enter_into_tables(type(self), default)
    for config in _tree(self.config):
        if canonical_name(config._attn_implementation) == NAME:
            _name_it(config, default)
    return NAME


def _set(original: Callable, self: PreTrainedModel, requested: str | dict, *args: Any, **kwargs: Any) -> None:
    before = [(config, config._attn_implementation) for config in _configs_of(self.modules())]
    try:
        original(self, canonical_name(requested), *args, **kwargs)
    finally:
        for config, implementation in before:
            if names_it(config) and implementation != NAME:
                _name_it(config, implementation)


def _name_it(config: PreTrainedConfig, before: str | None) -> None:
    assert state.current is not None
    setattr(config, _FIELD, NAME)
    state.current.patches.note(config, _FIELD, before, NAME)


def _configs_of(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Return the configs of modules, and their sub-configs, each once."""
    found = (getattr(module, "config", None) for module in modules)
    trees = (_tree(config) for config in found if isinstance(config, PreTrainedConfig))
    return list({id(config): config for tree in trees for config in tree}.values())


def _tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if isinstance(sub_config, PreTrainedConfig):
            yield from _tree(sub_config)


def _enter_into_tables(cls: type, default: str) -> None:
    """Let the files of models that choose classes by implementation choose for ours what they do for their default.

    For example, ``SAM_VISION_ATTENTION_CLASSES[config._attn_implementation]`` in transformers' modeling_sam.py; such
    classes call nothing by name.
    """
    assert state.current is not None
    for name, table in vars(sys.modules[cls.__module__]).items():
        if name.endswith(_TABLES) and isinstance(table, dict) and NAME not in table and "eager" in table:
            state.current.patches.item(table, NAME, table.get(default, table["eager"]))
