"""Acts on parameters: replaced, moved, changed, frozen."""

from random import Random

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from tests.support.programs.registry import act
from tests.support.programs.side import Side


def pick(side: Side, choice: Random) -> tuple[nn.Module, str, nn.Parameter]:
    """Choose a parameter: the module that holds it, its name there, and itself."""
    name, parameter = choice.choice(side.parameters())
    return *side.owner(name), parameter


@act()
def replace_a_parameter(side: Side, choice: Random) -> None:
    module, leaf, parameter = pick(side, choice)
    module._parameters[leaf] = nn.Parameter(parameter.detach() * 1.25, requires_grad=parameter.requires_grad)


@act()
def replace_data(side: Side, choice: Random) -> None:
    *_, parameter = pick(side, choice)
    parameter.data = parameter.data * 0.75


@act()
def replace_data_by_a_transposed_view(side: Side, choice: Random) -> None:
    *_, parameter = pick(side, choice)
    parameter.data = parameter.data.t().contiguous().t() if parameter.dim() == 2 else parameter.data.clone()


@act()
def replace_data_by_a_slice(side: Side, choice: Random) -> None:
    """A view of something larger, as loaders of whole files make them."""
    *_, parameter = pick(side, choice)
    larger = torch.cat((parameter.data[:1], parameter.data, parameter.data[:1]))
    parameter.data = larger[1:-1]


@act()
def change_in_place(side: Side, choice: Random) -> None:
    *_, parameter = pick(side, choice)
    with torch.no_grad():
        parameter.mul_(1.125).add_(0.0625)


@act()
def zero(side: Side, choice: Random) -> None:
    *_, parameter = pick(side, choice)
    nn.init.zeros_(parameter)


@act()
def swap_tensors(side: Side, choice: Random) -> None:
    *_, parameter = pick(side, choice)
    other = nn.Parameter(parameter.detach() * 0.875, requires_grad=parameter.requires_grad)
    torch.utils.swap_tensors(parameter, other)


@act()
def freeze_a_parameter(side: Side, choice: Random) -> None:
    *_, parameter = pick(side, choice)
    parameter.requires_grad_(False)


@act()
def freeze_a_module(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("Linear", "Norm", "MLP", "Experts", "Embedding", "DeltaNet"))
    module.requires_grad_(False)


@act()
def unfreeze(side: Side, choice: Random) -> None:
    for _, parameter in side.parameters():
        parameter.requires_grad_(True)


def same_shapes(side: Side, choice: Random) -> tuple[str, str]:
    """Choose the names of two parameters of one shape and dtype; of one parameter where no other is like it."""
    named = side.parameters()
    name, parameter = choice.choice(named)
    like = [n for n, p in named if p.shape == parameter.shape and p.dtype == parameter.dtype and p is not parameter]
    return name, choice.choice(like) if like else name


@act()
def share_data(side: Side, choice: Random) -> None:
    named = dict(side.parameters())
    first, second = same_shapes(side, choice)
    named[first].data = named[second].data


@act()
def tie(side: Side, choice: Random) -> None:
    named = dict(side.parameters())
    first, second = same_shapes(side, choice)
    module, leaf = side.owner(first)
    module._parameters[leaf] = named[second]


@act()
def untie(side: Side, choice: Random) -> None:
    """Give every name a parameter of its own."""
    for name, parameter in list(side.model.named_parameters(remove_duplicate=False)):
        module, leaf = side.owner(name)
        module._parameters[leaf] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)


@act()
def flatten(side: Side, choice: Random) -> None:
    """Lay parameters into one buffer, as optimizers that shard do, in the order of the model or backwards."""
    named = side.parameters()
    dtype = named[0][1].dtype
    parameters = [p for _, p in named if p.dtype == dtype]
    if choice.random() < 0.5:
        parameters.reverse()
    flat = torch.cat([p.detach().reshape(-1) for p in parameters])
    offset = 0
    for parameter in parameters:
        parameter.data = flat[offset : offset + parameter.numel()].view(parameter.shape)
        offset += parameter.numel()
    side.held["flat"] = flat


@act(lambda side: "flat" in side.held)
def write_through_the_flat_buffer(side: Side, choice: Random) -> None:
    side.held["flat"].mul_(0.9375)


@act(lambda side: all(p.is_contiguous() for _, p in side.parameters()))
def vector_and_back(side: Side, choice: Random) -> None:
    """Torch's function views each as one row, which those of transposed experts are not."""
    parameters = [p for _, p in side.parameters()]
    if len({p.dtype for p in parameters}) == 1:
        vector_to_parameters(parameters_to_vector(parameters).detach() * 0.96875, parameters)


@act()
def take_a_state_dict(side: Side, choice: Random) -> None:
    side.held["state"] = dict(side.model.state_dict())


@act()
def take_a_copy_of_the_state_dict(side: Side, choice: Random) -> None:
    side.held["state"] = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}


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
    side.model.load_state_dict(side.held["state"])


@act(same_keys)
def load_a_clone_of_the_state_dict(side: Side, choice: Random) -> None:
    side.model.load_state_dict({name: tensor.clone() for name, tensor in side.held["state"].items()})


@act(lambda side: same_keys(side) and not side.is_away)  # it has stayed where the model was
def assign_the_state_dict(side: Side, choice: Random) -> None:
    side.model.load_state_dict(side.held["state"], assign=True)


@act()
def assign_a_clone(side: Side, choice: Random) -> None:
    state = {name: tensor.clone() for name, tensor in side.model.state_dict().items()}
    side.model.load_state_dict(state, assign=True)


@act()
def assign_a_part(side: Side, choice: Random) -> None:
    state = side.model.state_dict()
    chosen = choice.sample(sorted(state), min(3, len(state)))
    side.model.load_state_dict({name: state[name] * 1.0625 for name in chosen}, strict=False, assign=True)


@act()
def load_in_half_the_bits(side: Side, choice: Random) -> None:
    state = {name: tensor.to(torch.bfloat16) for name, tensor in side.model.state_dict().items()}
    side.model.load_state_dict(state)


@act()
def assign_in_half_the_bits(side: Side, choice: Random) -> None:
    state = side.model.state_dict()
    side.model.load_state_dict(
        {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in state.items()}, assign=True
    )
