"""Which configs of models name our attention implementation, who chose that, and what they named before."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels_ext_npu import sources
from kernels_ext_npu.catalogue import IMPLEMENTATION as NAME
from kernels_ext_npu.swapping import state
from kernels_ext_npu.swapping.patches import ABSENT, Patches

REPOSITORY = "FlashAttention"
ON_HUB = f"{sources.ORGANISATION}/{REPOSITORY}"
_ANSWER = "_can_set_attn_implementation_cached_value"
_FIELD = "_attn_implementation_internal"  # what the property `_attn_implementation` of configs reads
_TABLES = "_ATTENTION_CLASSES"  # how the files of models call a dictionary of classes by implementation


def install(patches: Patches) -> None:
    """Let copies of configs be given back too, and what is pickled name what other processes know."""
    patches.attribute(PreTrainedConfig, "__deepcopy__", _deepcopy)
    patches.attribute(PreTrainedConfig, "__reduce_ex__", _reduce_ex)


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


def note(config: PreTrainedConfig, requested: str | None) -> None:
    """Note what was asked for when a model was made of a config.

    A model inside another one has its config, and would be asked for what the outer one took.
    """
    choices = _choices()
    if requested is None:
        choices.unnamed[id(config)] = config
    elif id(config) not in choices.unnamed:
        choices.name(config)


def adopt(model: PreTrainedModel) -> None:
    """Let the configs of a model that is being made name ours by our name, and note what it would have without it.

    Sub-configs with a model of their own are noted once more when that one is made.
    """
    default = model.get_correct_attn_implementation(None, is_init_check=True)
    _enter_into_tables(type(model), default)
    for config in _tree(model.config):
        if meant(config._attn_implementation) == NAME:
            if id(config) not in _choices().taken:
                _choices().name(config)
            _name_it(config, default)


def kernel() -> ModuleType:
    """Return the package of the kernel, which is loaded when it is first asked for."""
    assert state.current is not None
    if state.current.attention_kernel is None:
        state.current.attention_kernel = sources.load_package(state.current.source, REPOSITORY)
    return state.current.attention_kernel


def try_to_load() -> None:
    """Load the kernel now: while a graph is captured it would be too late.

    What is wrong is said when the kernel is needed.
    """
    with suppress(Exception):
        kernel()


def take(config: PreTrainedConfig) -> None:
    """Let a config name ours, for which nobody asked."""
    _choices().taken[id(config)] = config
    _name_it(config, config._attn_implementation)
    try_to_load()


def let_go(config: PreTrainedConfig) -> None:
    """Let a config that nobody told to name ours name again what it did before."""
    _patches().give_back(config, _FIELD)
    _choices().taken.pop(id(config), None)


def refuse(config: PreTrainedConfig, model: PreTrainedModel) -> None:
    """Let a config name again what it did before ours, and say that ours was asked for and is not for its model."""
    default = model.get_correct_attn_implementation(None)
    let_go(config)
    if names_it(config):
        setattr(config, _FIELD, default)
    _choices().named.pop(id(config), None)
    keeps_its_own(type(model), config._attn_implementation)


def keeps_its_own(cls: type[PreTrainedModel], implementation: str | None) -> None:
    """Warn that the models of a class do not call attention by the name that was asked for."""
    warnings.warn(
        f"{NAME}: {cls.__name__} does not call its attention by name, and keeps {implementation}", stacklevel=5
    )


def can_take_it(cls: type[PreTrainedModel]) -> bool:
    """Tell whether the modules of a class of models call an implementation by its name.

    transformers reads the file of the class for it, and remembers the answer in the class.
    """
    known = vars(cls).get(_ANSWER, ABSENT)
    answer = cls._can_set_attn_implementation()
    if known is ABSENT:
        _patches().note(cls, _ANSWER, known, vars(cls).get(_ANSWER, ABSENT))
    return answer


@contextmanager
def noted(model: PreTrainedModel, requested: Any) -> Iterator[None]:
    """Note what is asked for in the context, and what configs named before it that name ours after it."""
    before = [(config, config._attn_implementation) for config in configs_of(model.modules())]
    try:
        yield
    finally:
        for config, implementation in before:
            if names_it(config) and implementation != NAME:
                _name_it(config, implementation)
    asked_for = _asked_for(model.config, requested) if isinstance(requested, dict) else configs_of(model.modules())
    for config in asked_for:
        _choices().name(config)


def give_back(modules: Collection[nn.Module]) -> None:
    """Give the configs of modules what they named before ours, or what transformers gives their models by itself."""
    configs = configs_of(modules)
    ours = [config for config in configs if names_it(config)]
    defaults = {
        id(model.config): model.get_correct_attn_implementation(None)
        for model in modules
        if isinstance(model, PreTrainedModel)
    }
    for config in ours:
        if state.current is not None:
            let_go(config)
        if names_it(config):  # one that was noted by nobody; of a part without its model: every model has "eager"
            setattr(config, _FIELD, defaults.get(id(config), next(iter(defaults.values()), "eager")))
    if state.current is not None:
        _choices().restored.update({id(config): config for config in configs})


def configs_of(modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """Return the configs of modules, and their sub-configs, each once."""
    found = (getattr(module, "config", None) for module in modules)
    trees = (_tree(config) for config in found if isinstance(config, PreTrainedConfig))
    return list({id(config): config for tree in trees for config in tree}.values())


def _choices() -> state.AttentionChoices:
    assert state.current is not None
    return state.current.attention


def _patches() -> Patches:
    assert state.current is not None
    return state.current.patches


def _name_it(config: PreTrainedConfig, before: str | None) -> None:
    setattr(config, _FIELD, NAME)
    _patches().note(config, _FIELD, before, NAME)


def _before(config: PreTrainedConfig) -> Any:
    """Return what a config named before ours; transformers' first choice where nobody knows."""
    before = _patches().before(config, _FIELD)
    return "sdpa" if before is ABSENT else before


def _tree(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for key in config.sub_configs:
        sub_config = getattr(config, key, None)
        if isinstance(sub_config, PreTrainedConfig):
            yield from _tree(sub_config)


def _asked_for(config: PreTrainedConfig, requested: Any) -> Iterator[PreTrainedConfig]:
    """Return the configs for which an implementation is asked for, in transformers' words for sub-configs."""
    if not isinstance(requested, dict):
        yield from _tree(config)
        return
    if "" in requested:
        yield config
    for key in config.sub_configs:
        if key in requested and isinstance(getattr(config, key, None), PreTrainedConfig):
            yield from _asked_for(getattr(config, key), requested[key])


def _enter_into_tables(cls: type, default: str) -> None:
    """Let the files of models that choose classes by implementation choose for ours what they do for their default.

    For example, ``SAM_VISION_ATTENTION_CLASSES[config._attn_implementation]`` in transformers' modeling_sam.py; such
    classes call nothing by name.
    """
    for name, table in vars(sys.modules[cls.__module__]).items():
        if name.endswith(_TABLES) and isinstance(table, dict) and NAME not in table and "eager" in table:
            _patches().item(table, NAME, table.get(default, table["eager"]))


def _deepcopy(config: PreTrainedConfig, memo: dict[int, Any]) -> PreTrainedConfig:
    """Copy a config as `copy.deepcopy` does, and what is known of it."""
    copied = memo[id(config)] = type(config).__new__(type(config))
    vars(copied).update(copy.deepcopy(vars(config), memo))
    if state.uses(REPOSITORY):
        if names_it(config):
            _name_it(copied, _before(config))
        _choices().copy(config, copied)
    return copied


def _reduce_ex(config: PreTrainedConfig, protocol: Any) -> Any:
    """Describe a config for pickle: what reads it need not know our name."""
    reduced: Any = object.__reduce_ex__(config, protocol)
    make, arguments, attributes, *rest = reduced
    if state.uses(REPOSITORY) and names_it(config):
        attributes = attributes | {_FIELD: _before(config)}
    return make, arguments, attributes, *rest
