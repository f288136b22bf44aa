"""Which configs of models name our attention implementation, and what they named before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels_ext_npu import sources
from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.patches import ABSENT

NAME = "npu_flash_attention"
REPOSITORY = "FlashAttention"
ON_HUB = f"{sources.ORGANISATION}/{REPOSITORY}"
_ANSWER = "_can_set_attn_implementation_cached_value"
_FIELD = "_attn_implementation_internal"  # what the property `_attn_implementation` of configs reads


def meant(requested: Any) -> Any:
    """Return what was asked for, with our name wherever it or the repository on the Hub stands.

    Args:
        requested: a name; a dictionary of names, or of dictionaries, by sub-config; or None.
    """
    if isinstance(requested, dict):
        return {key: meant(value) for key, value in requested.items()}
    is_ours = isinstance(requested, str) and (requested == NAME or requested.partition("@")[0] == ON_HUB)
    return NAME if is_ours else requested


def names_it(config: Any) -> bool:
    """Tell whether a config names our implementation."""
    return isinstance(config, PreTrainedConfig) and config._attn_implementation == NAME


def adopt(model: PreTrainedModel) -> None:
    """Let the configs of a model that is being made name ours by our name, and note what it would have without it.

    Sub-configs with a model of their own are noted once more when that one is made.
    """
    default = model.get_correct_attn_implementation(None, is_init_check=True)
    for config in _tree(model.config):
        if meant(config._attn_implementation) == NAME:
            _name_it(config, default)


def can_take_it(cls: type[PreTrainedModel]) -> bool:
    """Tell whether the modules of a class of models call an implementation by its name.

    transformers reads the file of the class for it, and remembers the answer in the class.
    """
    assert state.current is not None
    known = vars(cls).get(_ANSWER, ABSENT)
    answer = cls._can_set_attn_implementation()
    state.current.patches.note(cls, _ANSWER, known, vars(cls).get(_ANSWER, ABSENT))
    return answer


@contextmanager
def noted(model: nn.Module) -> Iterator[None]:
    """Note what the configs of a model named before the context, where they name ours after it."""
    before = [(config, config._attn_implementation) for config in _configs_of(model.modules())]
    try:
        yield
    finally:
        for config, implementation in before:
            if names_it(config) and implementation != NAME:
                _name_it(config, implementation)


def give_back(modules: Collection[nn.Module]) -> None:
    """Give the configs of modules what they named before ours, or what transformers gives their models by itself."""
    configs = [config for config in _configs_of(modules) if names_it(config)]
    defaults = {
        id(model.config): model.get_correct_attn_implementation(None)
        for model in modules
        if isinstance(model, PreTrainedModel)
    }
    for config in configs:
        if state.current is not None:
            state.current.patches.give_back(config, _FIELD)
        if names_it(config):  # a copy of one that was noted; of a part without its model: every model has "eager"
            setattr(config, _FIELD, defaults.get(id(config), next(iter(defaults.values()), "eager")))


def _configs_of(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Return the configs of modules, and their sub-configs, each once."""
    found = (getattr(module, "config", None) for module in modules)
    trees = (_tree(config) for config in found if isinstance(config, PreTrainedConfig))
    return list({id(config): config for tree in trees for config in tree}.values())


def _name_it(config: PreTrainedConfig, before: str | None) -> None:
    assert state.current is not None
    setattr(config, _FIELD, NAME)
    state.current.patches.note(config, _FIELD, before, NAME)


def _tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if isinstance(sub_config, PreTrainedConfig):
            yield from _tree(sub_config)
