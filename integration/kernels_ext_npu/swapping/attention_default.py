"""Models on the NPU that would take transformers' default of attention take ours, as long as they are there.

transformers writes its default into the config of a model when it makes the model, long before the model is on its
device. Ours is written over it when the model arrives: when it is moved, made or loaded there, or kernelized. It goes
back when the model leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from kernels_ext_npu.swapping import attention_choice, state
from kernels_ext_npu.swapping.attention_choice import REPOSITORY
from kernels_ext_npu.swapping.devices import device_of, is_elsewhere
from kernels_ext_npu.swapping.patches import Patches


def install(patches: Patches) -> None:
    """Look at models when they are moved, and when one is made."""
    patches.method(PreTrainedModel, "_apply", _settled_after, is_installed)
    patches.method(PreTrainedModel, "post_init", _made, is_installed)


def is_installed() -> bool:
    """Tell whether models can take the implementation."""
    return state.uses(REPOSITORY)


def settle(model: nn.Module) -> None:
    """Let the configs of a model name ours where nothing is in the way, and no more where it has left the NPU."""
    assert state.current is not None
    kept = reasons(model)
    for config in attention_choice.configs_of(model.modules()):
        reason = kept.get(id(config), "")
        if reason is None and not attention_choice.names_it(config):
            attention_choice.take(config)
        elif reason and attention_choice.names_it(config) and id(config) in state.current.attention.taken:
            attention_choice.let_go(config)


def settle_anew(model: nn.Module) -> None:
    """Let a model take ours for which restore() was called before."""
    assert state.current is not None
    for config in attention_choice.configs_of(model.modules()):
        state.current.attention.restored.pop(id(config), None)
    settle(model)


def reasons(model: nn.Module) -> dict[int, str | None]:
    """Return why the configs of a model do not name ours of their own accord, by id; None where they do.

    A config is that of all modules of a transformers model, so that ours is for all of them or for none. Models that
    hold other models have no attention of their own: they make masks for those inside, and follow them.
    """
    from kernels_ext_npu.matching import kinds  # register() need not wait for references
    from kernels_ext_npu.swapping import attention_modules

    models = _models(model)
    unnamed = {id(config): kinds.UNNAMED for config in unfit(model)}
    modules: dict[int, list[Any]] = {}
    for module in model.modules():
        if attention_modules.calls_by_name(module):
            modules.setdefault(_config_of(module), []).append(module)
    found: dict[int, str | None] = {}
    for owner in models:
        for key in {_config_of(module) for module in owner.modules()} & modules.keys() - found.keys():
            found[key] = unnamed.get(key) or _reason(modules[key][0].config, owner, modules[key])
    for owner in models:
        inside = {_config_of(module) for module in owner.modules()} & modules.keys()
        if id(owner.config) not in found and inside:
            others = next((found[key] for key in inside if found[key] is not None), None)
            found[id(owner.config)] = unnamed.get(id(owner.config)) or _choice(owner.config, owner) or others
    return found


def unfit(model: nn.Module) -> list[PreTrainedConfig]:
    """Return the configs that must not name ours, as models make masks by them for modules that compute by themselves.

    For example that of Git, whose vision tower calls attention by name, and whose layers of text do not.
    """
    from kernels_ext_npu.matching import kinds

    classes = {cls for cls in map(type, model.modules()) if kinds.attends_by_itself(cls)}
    found: dict[int, PreTrainedConfig] = {}
    seen: set[nn.Module] = set()
    for owner in _models(model) if classes else ():
        inside = [module for module in owner.modules() if type(module) in classes]
        if not seen.issuperset(inside):
            found[id(owner.config)] = owner.config
            seen.update(inside)
    return list(found.values())


def withdraw(model: PreTrainedModel) -> None:
    """Let configs that were told to name ours, and must not, name again what they did before."""
    for config in unfit(model):
        if attention_choice.names_it(config):
            attention_choice.refuse(config, model)


def _models(model: nn.Module) -> list[PreTrainedModel]:
    """Return the models inside of a model and itself, those inside first."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)][::-1]


def _config_of(module: nn.Module) -> int:
    return id(getattr(module, "config", None))


def _reason(config: PreTrainedConfig, owner: PreTrainedModel, modules: list[nn.Module]) -> str | None:
    """Return why a config does not name ours of its own accord; None where it does."""
    from kernels_ext_npu.swapping import attention_modules, refusals

    refused = (attention_modules.refusal(module) for module in modules)
    reason = _choice(config, owner) or next((reason for reason in refused if reason is not None), None)
    if reason is not None:
        return reason
    return next((refusals.elsewhere(module) for module in modules if is_elsewhere(module)), None)


def _choice(config: PreTrainedConfig, owner: PreTrainedModel) -> str | None:
    """Return why a config keeps what it names; None where nobody chose that."""
    from kernels_ext_npu.matching import kinds
    from kernels_ext_npu.swapping import refusals

    assert state.current is not None
    choices = state.current.attention
    if id(config) in choices.restored:
        return refusals.NOT_ASKED_FOR
    if attention_choice.names_it(config):
        return None
    default = owner.get_correct_attn_implementation(None)
    if id(config) in choices.named or id(config) in choices.taken or config._attn_implementation != default:
        return f"the attention implementation {config._attn_implementation} was asked for"
    return None if attention_choice.can_take_it(type(owner)) else kinds.UNNAMED


def _made(original: Callable, self: PreTrainedModel) -> None:
    _settled_after(original, self)
    if any(map(attention_choice.names_it, attention_choice.configs_of([self]))):
        withdraw(self)


def _settled_after(original: Callable, self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    result = original(self, *args, **kwargs)
    if device_of(self) == "npu" or (state.current is not None and state.current.attention.taken):
        settle(self)
    return result
