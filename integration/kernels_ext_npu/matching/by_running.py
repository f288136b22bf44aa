"""Norms and gated MLPs of other people's code, found by what they compute: no spelling and no name is looked at.

A forward runs on small random numbers on the CPU, on a stand-in that shares nothing with the module but its settings.
Two witnesses have to agree. What it calls: a few operators of torch, without a host read, a branch on a size, a draw of
random numbers or a write. And what comes out: in float64, at magnitudes at which eps and clamps show, what the formula
gives, where straight lines of such operators that agree are the same function; then, of norms, in 16 bits and mixed
dtypes, where their roundings tell layers apart. What it was read from is kept beside it: other settings are another
question.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from itertools import permutations, product
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.matching.watched_runs import IN_FLOAT32, check_sizes, is_close, isolated, stand_in
from kernels_ext_npu.matching.watched_runs import run as run_forward

_SETTINGS = (bool, int, float, str, type(None), torch.dtype, torch.Size)
_CAST = "_to_copy"
_MEANS = {"mean", "sum", "norm", "vector_norm", "rms_norm"}
_MAGNITUDES = (1e-2, 1.0, 1e2, 1e4)


class Settings(NamedTuple):
    """What a forward may read of a module, but for its weights and its projections."""

    cls: type[nn.Module]
    forward: Any  # that of the class
    members: tuple[tuple[str, Any], ...]  # numbers, strings and the like, of the module or of its class
    absent: frozenset[str]  # what its code may look for, and the module does not have
    children: tuple[tuple[str, Settings], ...] = ()


class Recognised(NamedTuple):
    """What a module computes."""

    layer: str  # the layer that computes the same
    roles: tuple[tuple[str, Any], ...]  # what the layer reads -> the name of that in the module, or the value of eps
    settings: Settings  # for which that holds


_known: dict[Any, Recognised | None] = {}


def recognise(module: nn.Module) -> Recognised | None:
    """Return what a module computes; None if it is no norm and no gated MLP, or one that no layer computes."""
    settings = read_settings(module)
    if settings is None:
        return None
    shapes = tuple((name, None if p is None else (p.dim(), p.shape[-1:])) for name, p in module._parameters.items())
    key = settings, shapes
    if key not in _known:
        try:
            with isolated():
                found = (_gated_mlp if module._modules else _norm)(module)
        except Exception:  # whatever a forward raises that is given what it does not expect
            found = None
        _known[key] = None if found is None else Recognised(*found, settings)
    return _known[key]


def read_settings(module: nn.Module) -> Settings | None:
    """Return what a forward may read; None if there is more, such as tensors, objects, or modules inside of modules."""
    cls, own = type(module), vars(module)
    names = _names_read(cls, cls.forward)  # type: ignore[arg-type]
    members = {name: own[name] for name in names if name in own and name not in _OWN_TO_TORCH}
    on_class = {name: inspect.getattr_static(cls, name, None) for name in names.difference(own)}
    members |= {name: value for name, value in on_class.items() if value is not None and isinstance(value, _SETTINGS)}
    if module._buffers or not all(isinstance(value, _SETTINGS) for value in members.values()):
        return None
    others = {name: child for name, child in module._modules.items() if child is not None and not is_projection(child)}
    children = {name: None if any(child.children()) else read_settings(child) for name, child in others.items()}
    if None in children.values():
        return None
    absent = names.difference(own, members)
    return Settings(cls, cls.forward, (*members.items(),), absent, (*children.items(),))  # type: ignore[arg-type]


@functools.cache
def _names_read(cls: type[nn.Module], _: Any) -> frozenset[str]:
    """Return the names in the methods of a class with this forward, and in strings that may be names."""
    bases = [base for base in cls.__mro__ if base is cls or not base.__module__.startswith("torch.")]
    codes = [code for base in bases for code in _codes(base)]
    strings = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
    names = {name for code in codes for name in code.co_names} | set(filter(str.isidentifier, strings))
    return frozenset(names - {"forward"})  # under which ours is bound


def is_projection(child: Any) -> bool:
    """Tell whether a child multiplies with a weight, whatever its class does beside that: it is called as it is."""
    return hasattr(child, "in_features") and hasattr(child, "out_features")


_OWN_TO_TORCH = {*vars(nn.Module()), "training"}


def _norm(module: nn.Module) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    """Return the layer of a norm, its eps and the name of its weight, if it has one."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if len(names) > 1 or not _takes_one_tensor(module):
        return None
    if not names and _MEANS.isdisjoint(_names_read(type(module), type(module).forward)):  # type: ignore[arg-type]
        return None  # a module without numbers of its own may be there for what else it does, and is not run for a try
    weight = module._parameters[names[0]] if names else None
    if weight is not None and (weight.dim() != 1 or not weight.is_floating_point()):
        return None
    sizes = [value for value in vars(module).values() if type(value) is int and 1 < value <= 1 << 16]
    width = weight.shape[0] if weight is not None else next(iter(sizes), 64)

    def run(x: Tensor, weight: Tensor | None, training: bool = False, called: set[str] | None = None) -> Tensor:
        parameters = dict.fromkeys(module._parameters) | ({names[0]: weight} if names else {})
        return run_forward(module, {"_parameters": parameters, "training": training}, x, called)

    w = torch.randn(width, dtype=torch.float64) if names else None
    x = torch.randn(2, 3, width, dtype=torch.float64)
    for kind in ("",) if w is None else ("weight", "1 + weight"):
        scale = _SCALES[kind](w)
        eps = _eps(module, [(x * s, run(x * s, w) / scale) for s in (1e-3, 1e-6)])
        if eps is None:
            continue
        probes = [x * s for s in (1e-3, *_MAGNITUDES)] + [x[:1, :1], x[0], x[None]]
        for probe, training, with_grad in product(probes, (False, True), (False, True)):
            arguments = [each.clone().requires_grad_(with_grad) for each in (probe, *(() if w is None else (w,)))]
            with torch.set_grad_enabled(with_grad):
                found = run(arguments[0], None if w is None else arguments[1], training)
                normed = arguments[0] * torch.rsqrt(arguments[0].square().mean(-1, keepdim=True) + eps)
                if not _are_same(found, normed * _SCALES[kind](arguments[-1]), arguments):
                    return None
        check_sizes(lambda given: run(given, None if w is None else w.float()), width)
        called: set[str] = set()
        run(x.bfloat16(), None if w is None else w.bfloat16(), called=called)
        for layer, formula in _NORMS[kind]:
            # one that computes in 16 bits throughout is further from its own formula than the kernel
            is_never_cast = layer == "RMSNorm" and _CAST not in called
            if is_never_cast or all(_rounds_alike(run, formula, width, *dtypes, eps) for dtypes in _DTYPES):
                return layer, (("variance_epsilon", eps), *(("weight", name) for name in names))
    return None


def _n32(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _t5(x: Tensor, w: Tensor, eps: float) -> Tensor:
    normed = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return w * (normed if w.dtype is torch.float32 else normed.to(w.dtype))


# how the weight enters
_SCALES: dict[str, Callable[[Any], Any]] = {"": lambda _: 1.0, "weight": lambda w: w, "1 + weight": lambda w: 1 + w}
_Formula = Callable[[Tensor, Any, float], Tensor]
# the same -> formulas, with the layer that computes each
_NORMS: dict[str, list[tuple[str, _Formula]]] = {
    "weight": [
        ("RMSNorm", lambda x, w, eps: w * _n32(x, eps).to(x.dtype)),
        ("RMSNormCastLast", lambda x, w, eps: (w.float() * _n32(x, eps)).to(x.dtype)),
        ("T5LayerNorm", _t5),
    ],
    "1 + weight": [
        ("RMSNormZeroCentered", lambda x, w, eps: ((1 + w.float()) * _n32(x, eps)).to(x.dtype)),
        ("RMSNormZeroCentered", lambda x, w, eps: ((1 + w).float() * _n32(x, eps)).to(x.dtype)),
    ],
    "": [("RMSNormWeightless", lambda x, w, eps: _n32(x, eps).to(x.dtype))],
}
_DTYPES = [
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
]


def _rounds_alike(run: Callable, formula: _Formula, width: int, x_dtype: Any, w_dtype: Any, eps: float) -> bool:
    """Tell whether a forward gives the dtype and the bits of a formula: sums in another order change few of them."""
    x, w = torch.randn(64, width).to(x_dtype), torch.randn(width).to(w_dtype)
    found, expected = run(x, w), formula(x, w, eps)
    if found.dtype is not expected.dtype:
        return False
    if found.dtype is torch.float32:
        return is_close(found, expected)
    return bool((found != expected).float().mean() < 0.01)


def _eps(module: nn.Module, results: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """Return the eps of a norm: solved for from what it gives of small numbers, and then read where it is written."""
    candidates: set[float] | None = None
    numbers = {value for value in vars(module).values() if isinstance(value, float)}
    numbers |= {0.0, torch.finfo(torch.float32).eps}
    numbers |= {number for code in _codes(type(module)) for number in code.co_consts if isinstance(number, float)}
    for x, normed in results:
        mean, factor = x.square().mean(-1, keepdim=True), normed / x
        if not is_close(factor, factor[..., :1].expand_as(factor), 1e-4):  # another mean, or not the last dimension
            return None
        solved = (factor[..., :1].pow(-2) - mean).mean()
        near = {n for n in numbers if abs(n - solved) <= 1e-4 * (n + mean.max())}
        candidates = near if candidates is None else candidates & near
    return min(candidates) if candidates else None


def _codes(cls: type) -> Iterator[CodeType]:
    """Yield the code of the methods of a class itself, and of the functions in them."""
    codes = [value.__code__ for value in vars(cls).values() if isinstance(value, FunctionType)]
    for code in codes:  # grows while it runs
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield code


class _Leaf(nn.Module):
    """Stands for a linear layer: it gives random numbers, and keeps them and what it was given."""

    def __init__(self, width: int, magnitude: float) -> None:
        super().__init__()
        self.width, self.magnitude = width, magnitude
        self.seen: list[Tensor] = []
        self.given: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        result = self.magnitude * torch.randn(*x.shape[:-1], self.width, dtype=x.dtype)
        self.given.append(result.requires_grad_(torch.is_grad_enabled()))
        return result


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "SwiGLUMLP": F.silu,
    "GeGLUMLP": lambda x: F.gelu(x, approximate="tanh"),
    "ExactGeGLUMLP": F.gelu,
}


def _gated_mlp(module: nn.Module) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    """Return the layer of a gated MLP, and its projections: gate and up may be halves of one."""
    linear: dict[str, Any] = {name: child for name, child in module._modules.items() if is_projection(child)}
    others = [child for name, child in module._modules.items() if name not in linear and child is not None]
    own = [*module._parameters.values(), *(parameter for child in others for parameter in child.parameters())]
    if len(linear) not in (2, 3) or any(each is not None for each in own) or not _takes_one_tensor(module):
        return None
    width = next(iter(linear.values())).in_features

    def run(x: Tensor, magnitude: float = 1.0, training: bool = False) -> tuple[dict[str, _Leaf], Tensor]:
        leaves = {name: _Leaf(child.out_features, magnitude) for name, child in linear.items()}
        children: dict[str, Any] = {**module._modules, **leaves}
        for name in children.keys() - leaves.keys():
            children[name] = children[name] and stand_in(children[name], {"training": training})
        return leaves, run_forward(module, {"_modules": children, "training": training}, x)

    x = torch.randn(2, 3, width, dtype=torch.float64)
    found: set[tuple[Any, ...]] | None = None
    for given, magnitude, training, with_grad in product((x, x[0]), (1.0, *_MAGNITUDES), (False, True), (False, True)):
        with torch.set_grad_enabled(with_grad):
            roles = set(_find_roles(*run(given, magnitude, training), given))
        found = roles if found is None else found & roles
    if found is None or len(found) != 1:
        return None
    check_sizes(lambda given: run(given)[1], width)
    ((layer, gate, up, down),) = found
    if gate == up:
        return f"Fused{layer}", (("gate_up_proj", gate), ("down_proj", down))
    return layer, (("gate_proj", gate), ("up_proj", up), ("down_proj", down))


def _find_roles(leaves: dict[str, _Leaf], y: Tensor, x: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield how projections make a gated MLP: the layer, the names of gate, up and down.

    Gate and up may be halves of one, the gate first, as the operators take them.
    """
    down = next(name for name, leaf in leaves.items() if leaf.given and leaf.given[0] is y)
    ins = {name: leaf.given[0] for name, leaf in leaves.items() if name != down and leaf.seen[0] is x}
    if len(ins) + 1 < len(leaves) or any(len(leaf.seen) != 1 for leaf in leaves.values()):
        return
    for gate, up in permutations(ins) if len(ins) == 2 else ((*ins, *ins),):
        first, second = (ins[gate], ins[up]) if gate != up else ins[gate].chunk(2, -1)
        for layer, activation in _ACTIVATIONS.items():
            if _are_same(leaves[down].seen[0], activation(first) * second, [*ins.values()]):
                yield layer, gate, up, down


def _are_same(found: Tensor, expected: Tensor, arguments: list[Tensor]) -> bool:
    """Tell whether two results are the same, and their gradients with regard to some tensors, if they have any."""
    if not is_close(found, expected) or found.requires_grad != expected.requires_grad:
        return False
    if not found.requires_grad:
        return True
    grad = torch.randn_like(expected)
    ours, theirs = (
        torch.autograd.grad(each, arguments, grad.to(each.dtype), retain_graph=True) for each in (expected, found)
    )
    return all(is_close(b, a, 10 * IN_FLOAT32) for a, b in zip(ours, theirs))  # a sum more is rounded on the way


def _takes_one_tensor(module: nn.Module) -> bool:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
