"""Acts on activations that are modules of their own."""

from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

import kernels_ext_npu
from tests.support.programs.registry import act
from tests.support.programs.side import Side

NAMES = ("act", "act_fn", "activation_fn")  # in modeling files
KINDS = ("relu", "gelu_pytorch_tanh", "silu", "gelu", "gelu_new", "gelu_fast", "quick_gelu")


def places(side: Side) -> list[tuple[Any, str]]:
    """Return the modules that have an activation, with its name there."""
    return [(m, n) for _, m in side.named("") for n in NAMES if isinstance(m._modules.get(n), nn.Module)]


def activations(side: Side) -> list[nn.Module]:
    """Return the activations that are modules."""
    return [getattr(module, name) for module, name in places(side)]


def has_activations(side: Side) -> bool:
    """Tell whether there are any."""
    return bool(places(side))


@act(has_activations)
def change_an_activation(side: Side, choice: Random) -> None:
    module, name = choice.choice(places(side))
    setattr(module, name, ACT2FN[choice.choice(KINDS)])


@act(has_activations)
def share_an_activation(side: Side, choice: Random) -> None:
    (module, name), (other, other_name) = choice.choice(places(side)), choice.choice(places(side))
    setattr(module, name, getattr(other, other_name))


def halve(x: Tensor) -> Tensor:
    """Do something else than any activation."""
    return 0.5 * x


@act(has_activations)
def call_an_activation(side: Side, choice: Random) -> None:
    """By itself, with gradients."""
    x = torch.linspace(-4, 4, 16, device=side.device, requires_grad=True)
    result = choice.choice(activations(side))(x)
    if isinstance(result, Tensor) and result.requires_grad:
        side.show(result)
        side.show_gradient(torch.autograd.grad(result.sum(), x)[0])


@act(has_activations)
def replace_the_forward_of_an_activation(side: Side, choice: Random) -> None:
    choice.choice(activations(side)).forward = halve  # type: ignore[method-assign]


@act(has_activations, is_ours=True)
def restore_an_activation(side: Side, choice: Random) -> None:
    """Alone, without what it is in."""
    kernels_ext_npu.restore(choice.choice(activations(side)))
