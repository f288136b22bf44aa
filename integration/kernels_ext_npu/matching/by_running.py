"""Norms and gated MLPs of other people's code, found by what they compute: no spelling and no name is looked at.

A forward runs on small random numbers on the CPU, on a stand-in that shares nothing with the module but its settings.
Two witnesses have to agree. What it calls: a few operators of torch, without a host read, a branch on a size, a draw of
random numbers or a write. And what comes out: in float64, at magnitudes at which eps and clamps show, what the formula
gives, where straight lines of such operators that agree are the same function; then, of norms, in 16 bits and mixed
dtypes, where their roundings tell layers apart. What it was read from is kept beside it: other settings are another
question.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.matching.watched_runs import check_sizes, is_close, isolated, stand_in
from kernels_ext_npu.matching.watched_runs import run as run_forward

_SETTINGS = (bool, int, float, str, type(None), torch.dtype, torch.Size)
_CAST = "_to_copy"
_MAGNITUDES = (1e-2, 1.0, 1e2, 1e4)


class Recognised(NamedTuple):
    """What a module computes."""

    layer: str  # the layer that computes the same
    roles: tuple[tuple[str, Any], ...]  # what stands for what, as the layer calls it
    settings: tuple[tuple[str, Any], ...]  # the attributes and the forwards of children for which that holds


_known: dict[Any, Recognised | None] = {}


def recognise(module: nn.Module) -> Recognised | None:
    """Return what a module computes; None if it is no norm and no gated MLP, or one that no layer computes."""
    settings = settings_in(module)
    if settings is None:
        return None
    shapes = tuple((name, None if p is None else (p.dim(), p.shape[-1:])) for name, p in module._parameters.items())
    key = type(module), type(module).forward, settings, shapes
    if key not in _known:
        try:
            with isolated():
                found = (_gated_mlp if module._modules else _norm)(module)
        except Exception:  # whatever a forward raises that is given what it does not expect
            found = None
        _known[key] = None if found is None else Recognised(*found, settings)
    return _known[key]


def settings_in(module: nn.Module) -> tuple[tuple[str, Any], ...] | None:
    """Return the attributes of a module, and the children that are no projections; None if some are tensors."""
    own = {name: value for name, value in vars(module).items() if name not in _OWN_TO_TORCH and name != "forward"}
    if module._buffers or not all(isinstance(value, _SETTINGS) for value in own.values()):
        return None
    others = {name: child for name, child in module._modules.items() if not is_projection(child)}
    return (*own.items(), *((name, (type(child), type(child).forward)) for name, child in others.items() if child))


def is_projection(child: Any) -> bool:
    """Tell whether a child multiplies with a weight, whatever its class does beside that: it is called as it is."""
    return hasattr(child, "in_features") and hasattr(child, "out_features")


_OWN_TO_TORCH = {*vars(nn.Module()), "training"}


def _norm(module: nn.Module) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    """Return the layer of a norm, its eps and the name of its weight, if it has one."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if len(names) > 1 or not _takes_one_tensor(module):
        return None
    weight = module._parameters[names[0]] if names else None
    if weight is not None and (weight.dim() != 1 or not weight.is_floating_point()):
        return None
    sizes = [value for _, value in settings_in(module) or () if isinstance(value, int) and 1 < value <= 1 << 16]
    width = weight.shape[0] if weight is not None else next(iter(sizes), 64)

    def run(x: Tensor, weight: Tensor | None, training: bool = False, called: set[str] | None = None) -> Tensor:
        parameters = dict.fromkeys(module._parameters) | ({names[0]: weight} if names else {})
        return run_forward(module, {"_parameters": parameters, "training": training}, x, called)

    w = torch.randn(width, dtype=torch.float64) if names else None
    x = torch.randn(2, 3, width, dtype=torch.float64)
    scales = {"": torch.ones(width, dtype=torch.float64)} if w is None else {"weight": w, "1 + weight": 1 + w}
    for kind, scale in scales.items():
        eps = _eps(module, [(x * s, run(x * s, w) / scale) for s in (1e-3, 1e-6)])
        if eps is None:
            continue
        probes = [x * s for s in (1e-3, *_MAGNITUDES)] + [x[:1, :1], x[0], x[None]]
        expected = [scale * p * torch.rsqrt(p.square().mean(-1, keepdim=True) + eps) for p in probes]
        if not all(is_close(run(p, w, t), y) for p, y in zip(probes, expected) for t in (False, True)):
            continue
        check_sizes(lambda given: run(given, None if w is None else w.float()), width)
        called: set[str] = set()
        run(x.bfloat16(), None if w is None else w.bfloat16(), called=called)
        for layer, formula in _NORMS[kind]:
            # one that computes in 16 bits throughout is further from its own formula than the kernel
            is_never_cast = layer == "RMSNorm" and _CAST not in called
            if is_never_cast or all(_rounds_alike(run, formula, width, *dtypes, eps) for dtypes in _DTYPES):
                return layer, (("eps", eps), ("weight", names[0] if names else None))
    return None


def _n32(x: Tensor, eps: float) -> Tensor:
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _t5(x: Tensor, w: Tensor, eps: float) -> Tensor:
    normed = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return w * (normed if w.dtype is torch.float32 else normed.to(w.dtype))


_Formula = Callable[[Tensor, Any, float], Tensor]
# how the weight enters -> formulas, with the layer that computes each
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
    numbers = {value for _, value in settings_in(module) or () if isinstance(value, float)}
    numbers |= {0.0, torch.finfo(torch.float32).eps, *_constants(type(module))}
    for x, normed in results:
        mean, factor = x.square().mean(-1, keepdim=True), normed / x
        if not is_close(factor, factor[..., :1].expand_as(factor), 1e-4):  # another mean, or not the last dimension
            return None
        solved = (factor[..., :1].pow(-2) - mean).mean()
        near = {n for n in numbers if abs(n - solved) <= 1e-4 * (n + mean.max())}
        candidates = near if candidates is None else candidates & near
    return min(candidates) if candidates else None


def _constants(cls: type) -> Iterator[float]:
    """Yield the numbers that are written in the methods of a class."""
    codes = [value.__code__ for value in vars(cls).values() if isinstance(value, FunctionType)]
    for code in codes:  # grows while it runs
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from (constant for constant in code.co_consts if isinstance(constant, float))


class _Leaf(nn.Module):
    """Stands for a linear layer: it gives random numbers, and keeps them and what it was given."""

    def __init__(self, width: int, magnitude: float) -> None:
        super().__init__()
        self.width, self.magnitude = width, magnitude
        self.seen: list[Tensor] = []
        self.given: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        self.given.append(self.magnitude * torch.randn(*x.shape[:-1], self.width, dtype=x.dtype))
        return self.given[-1]


_UNITS: dict[str, Callable[[Tensor], Tensor]] = {
    "SwiGLUMLP": F.silu,
    "GeGLUMLP": lambda x: F.gelu(x, approximate="tanh"),
    "ExactGeGLUMLP": F.gelu,
}


def _gated_mlp(module: nn.Module) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    """Return the layer of a gated MLP, and the names of its projections."""
    linear: dict[str, Any] = {name: child for name, child in module._modules.items() if is_projection(child)}
    others = [child for name, child in module._modules.items() if name not in linear and child is not None]
    own = [*module._parameters.values(), *(parameter for child in others for parameter in child.parameters())]
    if len(linear) != 3 or any(each is not None for each in own) or not _takes_one_tensor(module):
        return None
    width = next(iter(linear.values())).in_features
    found = None
    for magnitude in (1.0, *_MAGNITUDES):
        for training in (False, True):
            leaves = {name: _Leaf(child.out_features, magnitude) for name, child in linear.items()}
            children: dict[str, Any] = {**module._modules, **leaves}
            for name in children.keys() - leaves.keys():
                children[name] = children[name] and stand_in(children[name], {"training": training})
            x = torch.randn(2, 3, width, dtype=torch.float64)
            y = run_forward(module, {"_modules": children, "training": training}, x)
            if any(len(leaf.seen) != 1 for leaf in leaves.values()):
                return None
            ins = [name for name, leaf in leaves.items() if leaf.seen[0] is x]
            (down,) = leaves.keys() - set(ins)
            if y is not leaves[down].given[0]:
                return None
            given = {name: leaves[name].given[0] for name in ins}
            fits = {
                (layer, gate, up, down)
                for gate, up in (ins, ins[::-1])
                for layer, unit in _UNITS.items()
                if is_close(leaves[down].seen[0], unit(given[gate]) * given[up])
            }
            found = fits if found is None else found & fits
    if not found or len(found) > 1:
        return None
    ((layer, gate, up, down),) = found
    stand_ins = {name: _Leaf(child.out_features, 1.0) for name, child in linear.items()}
    check_sizes(lambda given: run_forward(module, {"_modules": {**module._modules, **stand_ins}}, given), width)
    return layer, (("gate", gate), ("up", up), ("down", down))


def _takes_one_tensor(module: nn.Module) -> bool:
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return len(parameters) == 1 and parameters[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
