"""Acts that move a model: to other devices, dtypes and memory formats."""

from random import Random
from typing import Any

import torch
from torch import nn

from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side


def move(side: Side, module: nn.Module, device: str) -> None:
    """Move a module to another device; of the twin, which is on the CPU already, all tensors become others, too."""
    if side.home == "cpu":
        module._apply(torch.clone)
    else:
        module.to(device)


def is_home(side: Side) -> bool:
    """Tell whether the model is where it was at the start."""
    return not side.is_away


@act(is_home)
def move_to_the_cpu_and_back(side: Side, choice: Random) -> None:
    move(side, side.model, "cpu")
    move(side, side.model, side.home)


@act(is_home)
def move_to_the_cpu(side: Side, choice: Random) -> None:
    move(side, side.model, "cpu")
    side.is_away = True


@act(lambda side: side.is_away)
def move_home(side: Side, choice: Random) -> None:
    move(side, side.model, side.home)
    side.is_away = False


@act(is_home)
def move_a_part_to_the_cpu_and_back(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("DecoderLayer", "MLP", "Linear", "Norm", "Experts", "DeltaNet", "Mlp"))
    move(side, module, "cpu")
    if choice.random() < 0.5 and side.home == "npu":
        side.model.to(side.home)
    else:
        move(side, module, side.home)


@act(is_home)
def empty_and_load(side: Side, choice: Random) -> None:
    """To meta and back, and what was there before is loaded."""
    tensors = {name: tensor.detach().clone() for name, tensor in members(side.model).items()}
    side.model.to("meta")
    side.model.to_empty(device=side.home)
    with torch.no_grad():
        for name, tensor in members(side.model).items():
            tensor.copy_(tensors[name])


def members(model: nn.Module) -> dict[str, Any]:
    """Return parameters and buffers under all of their names."""
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


acts(
    cast_to_half_and_back=lambda side, choice: side.model.half().float(),
    cast_to_bfloat16_and_back=lambda side, choice: side.model.bfloat16().float(),
    cast_to_double_and_back=lambda side, choice: side.model.double().float(),
    cast_to_bfloat16=lambda side, choice: side.model.bfloat16(),
    cast_to_half=lambda side, choice: side.model.half(),
    cast_to_float=lambda side, choice: side.model.float(),
    change_the_memory_format=lambda side, choice: side.model.to(memory_format=torch.channels_last),
)


@act()
def cast_norms(side: Side, choice: Random) -> None:
    """RMS norms in float32 in a model of fewer bits, or the other way around."""
    for _, module in side.named("RMSNorm"):
        module.to(choice.choice([torch.float32, torch.bfloat16]))


def _can_swap(side: Side) -> bool:
    """Tell whether torch may exchange parameters.

    Not below the older weight norm, whose weight stays behind; nor what a file of the whole model held, since torch
    calls no hooks of that afterwards.
    """
    is_of_a_file = any(p._backward_hooks is not None and not p._backward_hooks for p in side.model.parameters())
    return is_home(side) and not is_of_a_file and not any(hasattr(m, "weight_g") for m in side.model.modules())


@act(_can_swap)
def swap_parameters_in_conversions(side: Side, choice: Random) -> None:
    """The way in which torch may convert parameters: by exchanging them with others."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        move_to_the_cpu_and_back(side, choice)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
