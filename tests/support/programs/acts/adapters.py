"""Acts of adapters: LoRA by peft, one or two, on, off, merged and taken away."""

from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.support.programs.registry import act, acts
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


def _adapters(side: Side) -> list[str]:
    model: Any = side.model
    return sorted(model.peft_config) if side.is_adapted else []


@act(lambda side: not side.is_adapted and bool(_targets(side)))
def add_an_adapter(side: Side, choice: Random) -> None:
    targets = _targets(side)
    chosen = choice.sample(targets, min(3, len(targets)))
    side.model = get_peft_model(side.model, LoraConfig(r=2, target_modules=chosen, lora_alpha=4))
    _draw(side)


@act(lambda side: len(_adapters(side)) == 1)
def add_another_adapter(side: Side, choice: Random) -> None:
    model: Any = side.model
    model.add_adapter("other", model.peft_config["default"])
    _draw(side)


@act(lambda side: len(_adapters(side)) == 2)
def delete_an_adapter(side: Side, choice: Random) -> None:
    model: Any = side.model
    model.set_adapter("default")
    model.delete_adapter("other")


@act(lambda side: side.is_adapted)
def call_without_the_adapter(side: Side, choice: Random) -> None:
    model: Any = side.model
    with model.disable_adapter():
        side.show(side.run().logits)


@act(lambda side: side.is_adapted)
def switch_the_adapter(side: Side, choice: Random) -> None:
    layers: Any = side.model.base_model
    (layers.disable_adapter_layers if choice.random() < 0.5 else layers.enable_adapter_layers)()


acts(
    lambda side: side.is_adapted,
    choose_an_adapter=lambda side, choice: side.model.set_adapter(choice.choice(_adapters(side))),
    merge_the_adapter=lambda side, choice: side.model.merge_adapter(),
    unmerge_the_adapter=lambda side, choice: side.model.unmerge_adapter(),
    unload_the_adapter=lambda side, choice: side.model.unload(),
)
acts(lambda side: side.is_adapted, computes=True, merge_and_unload=lambda side, choice: side.model.merge_and_unload())
