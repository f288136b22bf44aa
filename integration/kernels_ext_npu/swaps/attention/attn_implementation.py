"""Models that name our attention implementation: by its name, or by that of its repository on the Hub."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.distribution import sources
from kernels_ext_npu.swaps.attention import flash_attention_requested
from kernels_ext_npu.swaps.attention.eligibility import ASKED, BY_DEFAULT, EAGER, RESTORED, needs_mask_tensor

_ON_HUB = re.compile(rf"{sources.ORGANISATION}/{NPU_FLASH_ATTENTION.repository}(@[^:]*)?(:attention_forward)?")


def canonical_name(requested: Any) -> Any:
    """Return what was asked for, with our name in place of the repository's, and ``eager`` by who chose it.

    Args:
        requested: a name; a dictionary of names, or of dictionaries, by sub-config; or None.
    """
    if isinstance(requested, dict):
        return {key: canonical_name(value) for key, value in requested.items()}
    if requested == EAGER:  # an outer model passes what it has found to the models inside it
        return BY_DEFAULT if requested is BY_DEFAULT or requested is RESTORED[EAGER] else ASKED
    return NPU_FLASH_ATTENTION.name if isinstance(requested, str) and _ON_HUB.fullmatch(requested) else requested


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
    active = registration.current
    assert active is not None
    flash_attention_requested.patch_files({cls.__module__ for cls in type(self).__mro__}, active.patches)
    if active.source != "hub":  # unless that needs the network, the kernel is loaded before a graph is captured
        registration.try_package(NPU_FLASH_ATTENTION.repository)
    name = canonical_name(requested)
    if name not in NPU_FLASH_ATTENTION.names:
        found = original(self, name, *args, **kwargs)
        return BY_DEFAULT if name is None and found == EAGER else found
    default = original(self, None, *args, **kwargs)
    if not self._can_set_attn_implementation() or needs_mask_tensor(type(self.config)):
        kept = f"{name}: {type(self).__name__} does not call its attention by name, and keeps {default}"
        warnings.warn(kept, stacklevel=4)
        return default
    for table in vars(sys.modules[type(self).__module__]).values():
        # such as SAM_VISION_ATTENTION_CLASSES of transformers' modeling_sam.py, whose classes look nothing up by name
        if isinstance(table, dict) and isinstance(table.get(EAGER), type) and name not in table:
            active.patches.item(table, name, table.get(default, table[EAGER]))
    for config in _tree(self.config):
        if (named := canonical_name(config._attn_implementation)) in NPU_FLASH_ATTENTION.names:
            NPU_FLASH_ATTENTION.set_in(config, default, named)
    return name


def set_implementation(
    original: Callable, self: PreTrainedModel, requested: str | dict, *args: Any, **kwargs: Any
) -> None:
    """Let a model name an implementation, in place of its ``set_attn_implementation``."""
    requested = canonical_name(requested)
    top = requested.get("") if isinstance(requested, dict) else requested
    configs = [config for module in self.modules() for config in _tree(getattr(module, "config", None))]
    before = {id(config): (config, config._attn_implementation) for config in configs}  # one config is that of many
    try:
        original(self, requested, *args, **kwargs)
        if top == EAGER == self.config._attn_implementation:  # transformers leaves alone what names it already
            self.config._attn_implementation_internal = top
    finally:
        for config, implementation in before.values():
            if NPU_FLASH_ATTENTION.is_named_by(config) and implementation not in NPU_FLASH_ATTENTION.names:
                NPU_FLASH_ATTENTION.set_in(config, implementation, config._attn_implementation)


def _tree(config: Any) -> Iterator[PreTrainedConfig]:
    """Yield a config and its sub-configs; nothing where a module has none."""
    if isinstance(config, PreTrainedConfig):
        yield config
        for key in config.sub_configs:
            yield from _tree(getattr(config, key, None))
