"""Acts on weights: replaced, changed, frozen, computed from others, and moved to other devices, dtypes and formats."""

from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.support.programs.acts.kernels import inner
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side


def _to_one(change: Callable[[nn.Parameter], object]) -> Callable[[Side, Random], None]:
    """Change a parameter that is chosen."""

    def run(side: Side, choice: Random) -> None:
        with torch.no_grad():
            change(choice.choice(side.parameters())[1])

    return run


def _set_data(make: Callable[[Tensor], Tensor]) -> Callable[[Side, Random], None]:
    """Give a parameter that is chosen other data."""
    return _to_one(lambda parameter: setattr(parameter, "data", make(parameter.data)))


def _scaled(parameter: Tensor, factor: float) -> nn.Parameter:
    return nn.Parameter(parameter.detach() * factor, requires_grad=parameter.requires_grad)


acts(
    zero=_to_one(nn.init.zeros_),
    change_in_place=_to_one(lambda parameter: parameter.mul_(1.125).add_(0.0625)),
    freeze=lambda side, choice: side.model.requires_grad_(False),
    unfreeze=lambda side, choice: side.model.requires_grad_(True),
    freeze_a_parameter=_to_one(lambda parameter: parameter.requires_grad_(False)),
    swap_tensors=_to_one(lambda parameter: torch.utils.swap_tensors(parameter, _scaled(parameter, 0.875))),
    replace_data=_set_data(lambda data: data * 0.75),
    replace_data_by_a_transposed_view=_set_data(lambda d: d.t().contiguous().t() if d.dim() == 2 else d.clone()),
    # a view of something larger, as loaders of whole files make them
    replace_data_by_a_slice=_set_data(lambda data: torch.cat((data[:1], data, data[:1]))[1:-1]),
)


def _give(side: Side, name: str, parameter: nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    side.model.get_submodule(path)._parameters[leaf] = parameter


@act()
def replace_a_parameter(side: Side, choice: Random) -> None:
    name, parameter = choice.choice(side.parameters())
    _give(side, name, _scaled(parameter, 1.25))


@act()
def freeze_a_module(side: Side, choice: Random) -> None:
    """A module, or a model inside the model."""
    modules = side.named("Linear", "Norm", "MLP", "Experts", "Embedding", "DeltaNet")
    choice.choice([*modules, *inner(side)])[1].requires_grad_(False)


@act()
def tie_or_share_data(side: Side, choice: Random) -> None:
    """Of two parameters of one shape and dtype, or of one where no other is like it."""
    named = side.parameters()
    name, parameter = choice.choice(named)
    like = [(n, p) for n, p in named if (p.shape, p.dtype) == (parameter.shape, parameter.dtype) and n != name]
    other = choice.choice(like)[1] if like else parameter
    if choice.random() < 0.5:
        parameter.data = other.data
    else:
        _give(side, name, other)


@act()
def untie(side: Side, choice: Random) -> None:
    """Give every name a parameter of its own."""
    for name, parameter in list(side.model.named_parameters(remove_duplicate=False)):
        _give(side, name, _scaled(parameter, 1))


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


# ---- state dicts -----------------------------------------------------------------------------------------------------
acts(take_a_state_dict=lambda side, choice: side.held.update(state=dict(side.model.state_dict())))


@act()
def take_a_copy_of_the_state_dict(side: Side, choice: Random) -> None:
    """In its own dtypes, or in half the bits."""
    dtype, state = choice.choice([None, torch.bfloat16]), side.model.state_dict()
    side.held["state"] = {n: t.to(dtype=dtype if t.is_floating_point() else None, copy=True) for n, t in state.items()}


@act(lambda side: "state" in side.held)
def write_through_the_state_dict(side: Side, choice: Random) -> None:
    choice.choice([tensor for tensor in side.held["state"].values() if tensor.is_floating_point()]).mul_(0.875)


def same_keys(side: Side) -> bool:
    """Tell whether the held state dict is one of the model as it is."""
    state = side.held.get("state")
    if state is None:
        return False
    now = side.model.state_dict()
    return now.keys() == state.keys() and all(now[key].shape == state[key].shape for key in now)


@act(same_keys)
def load_the_state_dict(side: Side, choice: Random) -> None:
    """Or assign it, unless it has stayed where the model was."""
    side.model.load_state_dict(side.held["state"], assign=choice.random() < 0.5 and not side.is_away)


@act()
def assign_a_part(side: Side, choice: Random) -> None:
    state = side.model.state_dict()
    chosen = choice.sample(sorted(state), min(3, len(state)))
    side.model.load_state_dict({name: state[name] * 1.0625 for name in chosen}, strict=False, assign=True)


# ---- computed from others: weight norm, spectral norm, pruning -------------------------------------------------------
def plain_linears(side: Side) -> list[tuple[str, nn.Linear]]:
    """Return the linear layers whose weight is a parameter of their own."""
    return [(p, m) for p, m in side.model.named_modules() if type(m) is nn.Linear and "weight" in m._parameters]


def _linear(side: Side, choice: Random) -> Any:
    return choice.choice(plain_linears(side))[1]


class Doubled(nn.Module):
    """A parametrization that is not one at the start."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


@act(plain_linears)
def parametrize_by_weight_norm(side: Side, choice: Random) -> None:
    """The newer one, or the older one, by which a hook writes the weight before each call."""
    choice.choice([parametrizations.weight_norm, nn.utils.weight_norm])(_linear(side, choice))


@act(plain_linears)
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


@act(plain_linears)
def keep_a_weight_as_a_tensor(side: Side, choice: Random) -> None:
    """A weight that is no parameter any more."""
    module = _linear(side, choice)
    weight = module.weight.detach().clone()
    del module.weight
    module.register_buffer("weight", weight)


# ---- other devices, dtypes and memory formats ------------------------------------------------------------------------
def move(side: Side, module: nn.Module, device: str) -> None:
    """Move a module to another device; of the twin, which is on the CPU already, all tensors become others, too."""
    if side.home == "cpu":
        module._apply(torch.clone)
    else:
        module.to(device)


def is_home(side: Side) -> bool:
    """Tell whether the model is where it was at the start."""
    return not side.is_away


def move_away(side: Side, is_away: bool) -> None:
    """Move the model to the CPU, or to where it was at the start."""
    move(side, side.model, "cpu" if is_away else side.home)
    side.is_away = is_away


@act(is_home)
def move_to_the_cpu_and_back(side: Side, choice: Random) -> None:
    move_away(side, True)
    move_away(side, False)


acts(is_home, move_to_the_cpu=lambda side, choice: move_away(side, True))
acts(lambda side: side.is_away, move_home=lambda side, choice: move_away(side, False))


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
