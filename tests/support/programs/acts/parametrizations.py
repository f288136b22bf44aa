"""Acts that compute a weight from others: weight norm, spectral norm, pruning."""

from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.support.programs.registry import act
from tests.support.programs.side import Side


def plain_linears(side: Side) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers whose weight is a parameter of their own."""
    return [(p, m) for p, m in side.model.named_modules() if type(m) is nn.Linear and "weight" in m._parameters]


def _has_linears(side: Side) -> bool:
    return bool(plain_linears(side))


def _linear(side: Side, choice: Random) -> Any:
    return choice.choice(plain_linears(side))[1]


class Doubled(nn.Module):
    """A parametrization that is not one at the start."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@act(_has_linears)
def parametrize_by_weight_norm(side: Side, choice: Random) -> None:
    """The newer one, or the older one, by which a hook writes the weight before each call."""
    choice.choice([parametrizations.weight_norm, nn.utils.weight_norm])(_linear(side, choice))


@act(_has_linears)
def parametrize_by_spectral_norm(side: Side, choice: Random) -> None:
    """Its vectors are drawn by each device for itself: here they are the singular vectors, on both."""
    linear = _linear(side, choice)
    parametrizations.spectral_norm(linear)
    (spectral,) = linear.parametrizations.weight
    u, _, v = torch.linalg.svd(linear.parametrizations.weight.original.detach().cpu().float())
    spectral._u.copy_(u[:, 0])
    spectral._v.copy_(v[0])


@act()
def double_or_prune_a_weight(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("Linear", "Norm"))
    if "weight" in module._parameters and choice.random() < 0.5:
        parametrize.register_parametrization(module, "weight", Doubled())
    elif "weight" in module._parameters:
        prune.l1_unstructured(module, "weight", 0.25)


@act(lambda side: any(parametrize.is_parametrized(m) for m in side.model.modules()))
def remove_a_parametrization(side: Side, choice: Random) -> None:
    modules: Any = [m for m in side.model.modules() if parametrize.is_parametrized(m)]
    parametrize.remove_parametrizations(choice.choice(modules), "weight", leave_parametrized=True)


@act(lambda side: any(prune.is_pruned(m) for m in side.model.modules()))
def remove_pruning(side: Side, choice: Random) -> None:
    for _, module in side.named("Linear", "Norm"):
        if hasattr(module, "weight_mask"):
            prune.remove(module, "weight")


@act(_has_linears)
def keep_a_weight_as_a_tensor(side: Side, choice: Random) -> None:
    """A weight that is no parameter any more."""
    module = _linear(side, choice)
    weight = module.weight.detach().clone()
    del module.weight
    module.register_buffer("weight", weight)
