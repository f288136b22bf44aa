"""Acts on modules: their members, what they are, copies of them, and their activations."""

import copy
import functools
import pickle
from collections.abc import Callable
from random import Random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN, SiLUActivation

import kernels_ext_npu
from tests.support.programs.acts.kernels import inner, stays_off_the_hub
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


@act()
def change_an_epsilon(side: Side, choice: Random) -> None:
    _, norm = choice.choice(side.named("Norm"))
    name = "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"
    setattr(norm, name, choice.choice([0.1, 1e-2]))


@act(lambda side: bool(side.named("Experts")))
def change_alpha_or_limit(side: Side, choice: Random) -> None:
    for _, experts in side.named("Experts"):
        if hasattr(experts, "alpha"):
            setattr(experts, choice.choice(["alpha", "limit"]), choice.choice([0.5, 0.01, 3.0]))


@act(lambda side: bool(side.named("Router")))
def change_the_router(side: Side, choice: Random) -> None:
    for _, router in side.named("Router"):
        if hasattr(router, "norm_topk_prob") and choice.random() < 0.5:
            router.norm_topk_prob = not router.norm_topk_prob
        else:
            router.top_k = choice.choice([1, 2, 3])


@act()
def change_rotary_tables(side: Side, choice: Random) -> None:
    """Their scale, or their frequencies."""
    for _, table in side.named("RotaryEmbedding"):
        if choice.random() < 0.5:
            table.attention_scaling = choice.choice([1.5, 1.0])
        else:
            table.inv_freq.mul_(0.5)


class _Derived:
    """What makes a class of one whose forward gives more, or the same."""

    made: ClassVar[dict[tuple[type, float], type]] = {}

    @classmethod
    def of(cls, base: type, factor: float) -> type:
        """Return the class, always the same one."""
        if (base, factor) not in cls.made:

            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                return factor * base.forward(self, *args, **kwargs)  # type: ignore[attr-defined]

            members = {"__module__": __name__} | ({"forward": forward} if factor != 1 else {})
            cls.made[base, factor] = type(f"{base.__name__}{factor * 100:.0f}", (base,), members)
        return cls.made[base, factor]


def __getattr__(name: str) -> type:
    """Find a class again by its name: pickles of models need it."""
    for made in _Derived.made.values():
        if made.__name__ == name:
            return made
    raise AttributeError(name)


PATCHED = (
    *("MLP", "Norm", "GELUActivation", "Attention", "RotaryEmbedding", "Experts", "Router", "DeltaNet", "Linear"),
    *("Output", "Mlp"),
)


@act()
def change_a_class(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("MLP", "Norm", "GELUActivation"))
    module.__class__ = _Derived.of(type(module), choice.choice([1.25, 1]))


@act(lambda side: bool(_derived(side)))
def change_a_class_back(side: Side, choice: Random) -> None:
    module = choice.choice(_derived(side))
    module.__class__ = type(module).__base__


def _derived(side: Side) -> list[Any]:
    return [module for module in side.model.modules() if type(module) in _Derived.made.values()]


_patched: list[Callable[[], object]] = []  # what gives classes of the process back what they had


@act()
def change_the_forward_of_a_class(side: Side, choice: Random) -> None:
    """For all its instances, as patches of frameworks do, by one that calls it; both sides have one class."""
    _, module = choice.choice(side.named(*PATCHED))
    cls, factor = type(module), choice.choice([1.25, 1])
    if side.home != "cpu" or cls in _Derived.made.values():
        return
    original = cls.forward

    def patched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return times(original(self, *args, **kwargs), factor)

    cls.forward = functools.wraps(original)(patched) if choice.random() < 0.5 else patched
    _patched.append(functools.partial(setattr, cls, "forward", original))
    side.cleanups.append(_take_patches_back)


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

    patch = pytest.MonkeyPatch()
    patch.setattr(cls, "__call__", call, raising=False)
    _patched.append(patch.undo)
    side.cleanups.append(_take_patches_back)


@act()
def take_back_a_change_of_a_class(side: Side, choice: Random) -> None:
    """The newest patch, as contexts do."""
    if side.home == "cpu":
        _take_patches_back(1)


def _take_patches_back(number: int | None = None) -> None:
    for _ in range(len(_patched) if number is None else min(number, len(_patched))):
        _patched.pop()()


@act()
def wrap_a_forward(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("MLP", "Norm", "Linear", "DeltaNet", "GELUActivation"))
    original = module.forward
    module.forward = lambda *args, **kwargs: 1.25 * original(*args, **kwargs)


@act()
def replace_a_forward(side: Side, choice: Random) -> None:
    _, module = choice.choice(side.named("MLP", "Norm"))
    module.forward = lambda x, *rest: 0.5 * x


@act()
def replace_a_module_by_a_copy(side: Side, choice: Random) -> None:
    """A module, or a model inside the model."""
    modules = side.named("MLP", "Norm", "Linear", "Experts", "DecoderLayer", "DeltaNet", "Conv1d", "GELUActivation")
    path, module = choice.choice([*modules, *inner(side)])
    side.put(path, copy.deepcopy(module))


@act()
def replace_a_module_by_a_new_one(side: Side, choice: Random) -> None:
    """A layer of another size inside, or one that was trained elsewhere."""
    path, module = choice.choice([(p, m) for p, m in side.named("Linear") if type(m) is nn.Linear] or [("", None)])
    if module is not None:
        rows, width = module.weight.shape
        side.put(path, drawn(nn.Linear(width, rows, device=side.device, dtype=module.weight.dtype), 3))


@act()
def replace_a_norm_by_another_kind(side: Side, choice: Random) -> None:
    path, norm = choice.choice(side.named("Norm"))
    size = getattr(norm, "weight", None)
    if isinstance(size, torch.Tensor) and size.dim() == 1:
        side.put(path, nn.RMSNorm(size.shape[0], eps=1e-5).to(size.device, size.dtype))


def _has_equal_layers(side: Side) -> bool:
    """Tell whether there are layers that can stand in each other's places: none that get another mask there."""
    return len(side.named("DecoderLayer")) > 1 and not side.named("GatedDeltaNet")


@act(lambda side: len(side.named("MLP")) > 1)
def share_an_mlp(side: Side, choice: Random) -> None:
    (_, first), (path, _) = side.named("MLP")[:2]
    side.put(path, first)


@act(_has_equal_layers)
def share_or_exchange_layers(side: Side, choice: Random) -> None:
    (first, a), (second, b) = side.named("DecoderLayer")[:2]
    side.put(second, a)
    if choice.random() < 0.5:
        side.put(first, b)


@act(lambda side: bool(_projected(side)))
def narrow_an_mlp(side: Side, choice: Random) -> None:
    """Take some of its inner features away, as pruning by structure does."""
    mlp = choice.choice(_projected(side))
    kept = mlp.gate_proj.weight.shape[0] - 8
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight = nn.Parameter(linear.weight.detach()[:kept].clone())
        if linear.bias is not None:
            linear.bias = nn.Parameter(linear.bias.detach()[:kept].clone())
    mlp.down_proj.weight = nn.Parameter(mlp.down_proj.weight.detach()[:, :kept].clone())


def _projected(side: Side) -> list[Any]:
    def is_plain(mlp: Any) -> bool:
        parts = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        if not all(type(part) is nn.Linear and "weight" in part._parameters for part in parts):
            return False
        return mlp.gate_proj.weight.shape == mlp.up_proj.weight.shape and mlp.gate_proj.weight.shape[0] > 16

    return [m for _, m in side.named("MLP") if hasattr(m, "gate_proj") and is_plain(m)]


acts(
    copy_deeply=lambda side, choice: copy.deepcopy(side.model),
    copy_shallowly=lambda side, choice: copy.copy(side.model),
    # the twin is copied: Python cannot pickle the rotary functions that `kernels` decorates, and ours lets it
    pickle_it=lambda side, choice: (
        pickle.loads(pickle.dumps(side.model)) if side.home == "npu" else copy.deepcopy(side.model)
    ),
)


@act()
def copy_deeply_and_drop_the_kernels_of_the_first(side: Side, choice: Random) -> None:
    first = side.model
    side.model = copy.deepcopy(first)
    if side.has_kernels:
        kernels_ext_npu.restore(first)


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
