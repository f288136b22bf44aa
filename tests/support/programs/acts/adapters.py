"""Acts of adapters: LoRA by peft, one or two, on, off, merged and taken away."""

from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.support.programs.registry import act
from tests.support.programs.side import Side


def _targets(side: Side) -> list[str]:
    """Return the last names of linear layers that nothing else has: a number is the name of blocks, too."""
    linear = {path.rpartition(".")[2] for path, _ in side.named("Linear")} - {"lm_head", "embed_out", "base_layer"}
    others = {path.rpartition(".")[2] for path, module in side.named("") if not isinstance(module, nn.Linear)}
    return sorted(name for name in linear - others if not name.isdigit())


def _draw(side: Side) -> None:
    """Draw weights of adapters on the host: half of them would be zero, and each device draws others."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in side.model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)


def _config(side: Side, choice: Random) -> LoraConfig:
    targets = _targets(side)
    chosen = choice.sample(targets, min(3, len(targets)))
    return LoraConfig(r=2, target_modules=chosen, lora_alpha=4)


def is_plain(side: Side) -> bool:
    """Tell whether a model has no adapter."""
    return not side.is_adapted and bool(_targets(side))


def is_adapted(side: Side) -> bool:
    """Tell whether a model has an adapter."""
    return side.is_adapted


def _peft(side: Side) -> Any:
    return side.model


@act(is_plain)
def add_an_adapter(side: Side, choice: Random) -> None:
    side.model = get_peft_model(side.model, _config(side, choice))
    _draw(side)


@act(lambda side: side.is_adapted and len(_peft(side).peft_config) == 1)
def add_another_adapter(side: Side, choice: Random) -> None:
    _peft(side).add_adapter("other", _peft(side).peft_config["default"])
    _draw(side)


@act(is_adapted)
def choose_an_adapter(side: Side, choice: Random) -> None:
    _peft(side).set_adapter(choice.choice(sorted(_peft(side).peft_config)))


@act(lambda side: side.is_adapted and len(_peft(side).peft_config) == 2)
def delete_an_adapter(side: Side, choice: Random) -> None:
    _peft(side).set_adapter("default")
    _peft(side).delete_adapter("other")


@act(is_adapted)
def call_without_the_adapter(side: Side, choice: Random) -> None:
    with _peft(side).disable_adapter():
        side.show(side.run().logits)


@act(is_adapted)
def switch_the_adapter(side: Side, choice: Random) -> None:
    layers = _peft(side).base_model
    (layers.disable_adapter_layers if choice.random() < 0.5 else layers.enable_adapter_layers)()


@act(is_adapted)
def merge_the_adapter(side: Side, choice: Random) -> None:
    _peft(side).merge_adapter()


@act(is_adapted)
def unmerge_the_adapter(side: Side, choice: Random) -> None:
    _peft(side).unmerge_adapter()


@act(is_adapted, computes=True)
def merge_and_unload(side: Side, choice: Random) -> None:
    side.model = _peft(side).merge_and_unload()


@act(is_adapted)
def unload_the_adapter(side: Side, choice: Random) -> None:
    side.model = _peft(side).unload()
