"""Acts on modules: their members, what they are, copies of them, and their activations."""

import copy
import functools
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, SiLUActivation

import kernels_ext_npu
from tests.support.programs.acts.kernels import inner, stays_off_the_hub
from tests.support.programs.acts.weights import plain_linears
from tests.support.programs.registry import act, acts
from tests.support.programs.side import Side


def times(result: Any, factor: float = 1.25) -> Any:
    """Scale what a forward gives or is given, the first of several."""
    return factor * result if isinstance(result, torch.Tensor) else (factor * result[0], *result[1:])


def drawn(module: nn.Module, seed: int, divisor: float = 6) -> nn.Module:
    """Draw the weights of a new module on the host: each device would draw others."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / divisor)
    return module


# members that a forward reads: by act, how the names of classes end that have them, and values that they may get
MEMBERS: dict[str, tuple[str, dict[str, tuple]]] = {
    "change_an_epsilon": ("Norm", dict.fromkeys(("variance_epsilon", "eps"), (0.1, 1e-2))),
    "change_alpha_or_limit": ("Experts", dict.fromkeys(("alpha", "limit"), (0.5, 0.01, 3.0))),
    "change_the_router": ("Router", {"top_k": (1, 2, 3), "norm_topk_prob": (True, False)}),
    "change_the_scale_of_tables": ("RotaryEmbedding", {"attention_scaling": (1.5, 1.0)}),
    "change_the_scale_of_scores": ("Attention", {"scaling": (0.125, 0.5)}),
    "change_the_activation_of_a_convolution": (
        "GatedDeltaNet", {"activation": ("silu", "swish", None, "relu", "gelu")},
    ),
}  # fmt: skip


def _read(side: Side, act: str) -> list[tuple[Any, str]]:
    ending, values = MEMBERS[act]
    return [(module, name) for _, module in side.named(ending) for name in values if hasattr(module, name)]


def _change(side: Side, choice: Random, act: str) -> None:
    module, name = choice.choice(_read(side, act))
    setattr(module, name, choice.choice(MEMBERS[act][1][name]))


for _act in MEMBERS:
    acts(lambda side, act=_act: bool(_read(side, act)), **{_act: functools.partial(_change, act=_act)})


@act(lambda side: any(hasattr(table, "inv_freq") for _, table in side.named("RotaryEmbedding")))
def halve_frequencies(side: Side, choice: Random) -> None:
    for _, table in side.named("RotaryEmbedding"):
        table.inv_freq.mul_(0.5)


_DERIVED: dict[tuple[type, float], type] = {}


def _derive(base: Any, factor: float) -> type:
    """Return the class of one whose forward gives more, or the same; pickles find it here by its name."""
    if (base, factor) not in _DERIVED:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return factor * base.forward(self, *args, **kwargs)

        name = f"{base.__name__}{factor * 100:.0f}"
        members = {"__module__": __name__} | ({"forward": forward} if factor != 1 else {})
        globals()[name] = _DERIVED[base, factor] = type(name, (base,), members)
    return _DERIVED[base, factor]


PATCHED = (
    *("MLP", "Norm", "GELUActivation", "Attention", "RotaryEmbedding", "Experts", "Router", "DeltaNet", "Linear"),
    *("Output", "Mlp"),
)


@act()
def change_a_class(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("MLP", "Norm", "GELUActivation"))
    module.__class__ = _derive(type(module), choice.choice([1.25, 1]))


def _derived(side: Side) -> list[Any]:
    return [module for module in side.model.modules() if type(module) in _DERIVED.values()]


@act(_derived)
def change_a_class_back(side: Side, choice: Random) -> None:
    module = choice.choice(_derived(side))
    module.__class__ = type(module).__base__


@act(lambda side: not side.held.get("forwards of then"))
def change_the_forward_of_a_class(side: Side, choice: Random) -> None:
    """For all its instances, as patches of frameworks do; torch makes a class for each parametrized module."""
    _, module = choice.choice(side.named(*PATCHED))
    cls, factor = type(module), choice.choice([1.25, 1])
    if cls in _DERIVED.values() or (side.home != "cpu" and not nn.utils.parametrize.is_parametrized(module)):
        return
    original = cls.forward

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return times(original(self, *args, **kwargs), factor)

    patch(side, cls, "forward", functools.wraps(original)(patched) if choice.random() < 0.5 else patched)


CALLED = (nn.LayerNorm, nn.Linear, nn.SiLU, SiLUActivation)


@act()
def replace_the_calls_of_a_class(side: Side, choice: Random) -> None:
    """Of one of torch's, or of all modules, as what watches them does: of some it gives more."""
    found = {type(module) for module in side.model.modules()}
    cls = choice.choice([nn.Module, *(each for each in CALLED if each in found)])
    if side.home != "cpu":
        return
    original = cls.__call__

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        return times(result) if type(self) in CALLED else result

    patch(side, cls, "__call__", call)


def patch(side: Side, holder: Any, name: str, function: Callable) -> None:
    """Put a function into a class or a file, of which both sides have one."""
    patched = pytest.MonkeyPatch()
    patched.setattr(holder, name, function, raising=False)
    side.held.setdefault("patches", []).append(patched)
    side.cleanups.append(patched.undo)


@act()
def take_back_a_change_of_a_class(side: Side, choice: Random) -> None:
    """The newest patch, as contexts do; the twin has all of them."""
    if side.held.get("patches"):
        side.held["patches"].pop().undo()


@act()
def wrap_a_forward(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("MLP", "Norm", "Linear", "DeltaNet", "GELUActivation"))
    original = module.forward
    module.forward = lambda *args, **kwargs: 1.25 * original(*args, **kwargs)


@act()
def replace_a_module_by_a_copy(side: Side, choice: Random) -> None:
    """A module, or a model inside the model."""
    modules = side.named("MLP", "Norm", "Linear", "Experts", "DecoderLayer", "DeltaNet", "Conv1d", "GELUActivation")
    path, module = choice.choice([*modules, *inner(side)])
    side.model.set_submodule(path, copy.deepcopy(module))


@act(plain_linears)
def replace_a_module_by_a_new_one(side: Side, choice: Random) -> None:
    """A layer that was trained elsewhere."""
    path, module = choice.choice(plain_linears(side))
    rows, width = module.weight.shape
    side.model.set_submodule(path, drawn(nn.Linear(width, rows, device=side.device, dtype=module.weight.dtype), 3))


@act()
def replace_a_norm_by_another_kind(side: Side, choice: Random) -> None:
    path, norm = choice.choice(side.named("Norm"))
    size = getattr(norm, "weight", None)
    if isinstance(size, torch.Tensor) and size.dim() == 1:
        side.model.set_submodule(path, nn.RMSNorm(size.shape[0], eps=1e-5).to(size.device, size.dtype))


@act(lambda side: len(side.named("MLP")) > 1)
def share_an_mlp(side: Side, choice: Random) -> None:
    (_, first), (path, _) = side.named("MLP")[:2]
    side.model.set_submodule(path, first)


# layers that can stand in each other's places: none gets another mask there
@act(lambda side: len(side.named("DecoderLayer")) > 1 and not side.named("GatedDeltaNet"))
def share_or_exchange_layers(side: Side, choice: Random) -> None:
    (first, a), (second, b) = side.named("DecoderLayer")[:2]
    side.model.set_submodule(second, a)
    if choice.random() < 0.5:
        side.model.set_submodule(first, b)


acts(
    copy_deeply=lambda side, choice: copy.deepcopy(side.model),
    copy_shallowly=lambda side, choice: copy.copy(side.model),
    # the twin is copied: Python cannot pickle the rotary functions that `kernels` decorates, and ours lets it
    pickle_it=lambda side, choice: (
        side.held.update({"forwards of then": not side.is_registered})
        or (pickle.loads(pickle.dumps(side.model)) if side.home == "npu" else copy.deepcopy(side.model))
    ),
)


@act()
def copy_deeply_and_drop_the_kernels_of_the_first(side: Side, choice: Random) -> nn.Module:
    copied = copy.deepcopy(side.model)
    if side.has_kernels:
        kernels_ext_npu.restore(side.model)
    return copied


@act(stays_off_the_hub)
def train_a_copy(side: Side, choice: Random) -> None:
    """The model that was copied stays as it is."""
    other = copy.deepcopy(side.model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.train()


# ---- activations that are modules of their own -----------------------------------------------------------------------
NAMES = ("act", "act_fn", "activation_fn")  # in modeling files
KINDS = ("relu", "gelu_pytorch_tanh", "silu", "gelu", "gelu_new", "gelu_fast", "quick_gelu")


def places(side: Side) -> list[tuple[Any, str]]:
    """Return the modules that have an activation, with its name there."""
    return [(m, n) for _, m in side.named("") for n in NAMES if isinstance(m._modules.get(n), nn.Module)]


def activations(side: Side) -> list[nn.Module]:
    """Return the activations that are modules."""
    return [getattr(module, name) for module, name in places(side)]


def halve(x: Tensor) -> Tensor:
    """Do something else than any activation."""
    return 0.5 * x


acts(
    places,
    change_an_activation=lambda side, choice: setattr(*choice.choice(places(side)), ACT2FN[choice.choice(KINDS)]),
    share_an_activation=lambda side, choice: setattr(*choice.choice(places(side)), choice.choice(activations(side))),
    replace_the_forward_of_an_activation=lambda side, choice: setattr(
        choice.choice(activations(side)), "forward", halve
    ),
)


@act(places, is_ours=True)
def restore_an_activation(side: Side, choice: Random) -> None:
    """Alone, without what it is in."""
    kernels_ext_npu.restore(choice.choice(activations(side)))
