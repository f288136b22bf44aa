"""Acts on parameters: replaced, moved, changed, frozen."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support.programs.acts.kernels import inner
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side


def _to_one(change: Callable[[nn.Parameter], object]) -> Callable[[Side, Random], None]:
    """Change a parameter that is chosen."""

    def run(side: Side, choice: Random) -> None:
        with torch.no_grad():
            change(choice.choice(side.parameters())[1])

    return run


def _of_data(make: Callable[[Tensor], Tensor]) -> Callable[[Side, Random], None]:
    """Give a parameter that is chosen other data."""
    return _to_one(lambda parameter: setattr(parameter, "data", make(parameter.data)))


def _scaled(parameter: Tensor, factor: float) -> nn.Parameter:
    return nn.Parameter(parameter.detach() * factor, requires_grad=parameter.requires_grad)


acts(
    zero=_to_one(nn.init.zeros_),
    change_in_place=_to_one(lambda parameter: parameter.mul_(1.125).add_(0.0625)),
    freeze=lambda side, choice: side.model.requires_grad_(False),
    freeze_a_parameter=_to_one(lambda parameter: parameter.requires_grad_(False)),
    swap_tensors=_to_one(lambda parameter: torch.utils.swap_tensors(parameter, _scaled(parameter, 0.875))),
    replace_data=_of_data(lambda data: data * 0.75),
    replace_data_by_a_transposed_view=_of_data(lambda d: d.t().contiguous().t() if d.dim() == 2 else d.clone()),
    # a view of something larger, as loaders of whole files make them
    replace_data_by_a_slice=_of_data(lambda data: torch.cat((data[:1], data, data[:1]))[1:-1]),
)


@act()
def replace_a_parameter(side: Side, choice: Random) -> None:
    name, parameter = choice.choice(side.parameters())
    module, leaf = side.owner(name)
    module._parameters[leaf] = _scaled(parameter, 1.25)


@act()
def freeze_a_module(side: Side, choice: Random) -> None:
    """A module, or a model inside the model."""
    modules = side.named("Linear", "Norm", "MLP", "Experts", "Embedding", "DeltaNet")
    choice.choice([*modules, *inner(side)])[1].requires_grad_(False)


@act()
def unfreeze(side: Side, choice: Random) -> None:
    for _, parameter in side.parameters():
        parameter.requires_grad_(True)


@act()
def tie_or_share_data(side: Side, choice: Random) -> None:
    """Of two parameters of one shape and dtype, or of one where no other is like it."""
    named = side.parameters()
    name, parameter = choice.choice(named)
    like = [p for _, p in named if p.shape == parameter.shape and p.dtype == parameter.dtype and p is not parameter]
    other = choice.choice(like) if like else parameter
    if choice.random() < 0.5:
        parameter.data = other.data
    else:
        module, leaf = side.owner(name)
        module._parameters[leaf] = other


@act()
def untie(side: Side, choice: Random) -> None:
    """Give every name a parameter of its own."""
    for name, parameter in list(side.model.named_parameters(remove_duplicate=False)):
        module, leaf = side.owner(name)
        module._parameters[leaf] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


@act()
def flatten(side: Side, choice: Random) -> None:
    """Lay parameters into one buffer, as optimizers that shard do, in an order, and perhaps with gaps."""
    named = side.parameters()
    if choice.random() < 0.5:
        named.reverse()
    if choice.random() < 0.5:
        named.sort(key=lambda each: each[0].split(".")[::-1])  # weights of one name together, gate apart from up
    gap = choice.choice([0, 7])
    parameters = [p for _, p in named if p.dtype == named[0][1].dtype]
    parts = [nn.functional.pad(p.detach().reshape(-1), (0, gap)) for p in parameters]
    side.held["flat"] = torch.cat(parts)
    for parameter, part in zip(parameters, side.held["flat"].split([part.numel() for part in parts])):
        parameter.data = part[: parameter.numel()].view(parameter.shape)


acts(
    lambda side: "flat" in side.held,
    write_through_the_flat_buffer=lambda side, choice: side.held["flat"].mul_(0.9375),
)


@act(lambda side: all(p.is_contiguous() for _, p in side.parameters()))
def vector_and_back(side: Side, choice: Random) -> None:
    """Torch's function views each as one row, which those of transposed experts are not."""
    parameters = [p for _, p in side.parameters()]
    if len({p.dtype for p in parameters}) == 1:
        vector_to_parameters(parameters_to_vector(parameters).detach() * 0.96875, parameters)


# ---- state dicts -----------------------------------------------------------------------------------------------------
def cloned(state: dict[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Copy tensors, floating ones to a dtype if one is given."""
    floating = {name: dtype if tensor.is_floating_point() else None for name, tensor in state.items()}
    return {name: tensor.to(dtype=floating[name] or tensor.dtype, copy=True) for name, tensor in state.items()}


@act()
def take_a_state_dict(side: Side, choice: Random) -> None:
    side.held["state"] = dict(side.model.state_dict())


@act()
def take_a_copy_of_the_state_dict(side: Side, choice: Random) -> None:
    side.held["state"] = cloned(side.model.state_dict())


@act(lambda side: "state" in side.held)
def write_through_the_state_dict(side: Side, choice: Random) -> None:
    state = side.held["state"]
    key = choice.choice([name for name, tensor in state.items() if tensor.is_floating_point()])
    state[key].mul_(0.875)


def same_keys(side: Side) -> bool:
    """Tell whether the held state dict is one of the model as it is."""
    state = side.held.get("state")
    if state is None:
        return False
    now = side.model.state_dict()
    return now.keys() == state.keys() and all(now[key].shape == state[key].shape for key in now)


@act(same_keys)
def load_the_state_dict(side: Side, choice: Random) -> None:
    """Or a clone, or assign it, unless it has stayed where the model was."""
    state, assign = side.held["state"], choice.random() < 0.5 and not side.is_away
    side.model.load_state_dict(cloned(state) if choice.random() < 0.5 else state, assign=assign)


@act()
def load_its_own_state_dict(side: Side, choice: Random) -> None:
    """A clone in its own dtype or in half the bits, copied or assigned."""
    state = cloned(side.model.state_dict(), choice.choice([None, torch.bfloat16]))
    side.model.load_state_dict(state, assign=choice.random() < 0.5)


@act()
def assign_a_part(side: Side, choice: Random) -> None:
    state = side.model.state_dict()
    chosen = choice.sample(sorted(state), min(3, len(state)))
    side.model.load_state_dict({name: state[name] * 1.0625 for name in chosen}, strict=False, assign=True)
