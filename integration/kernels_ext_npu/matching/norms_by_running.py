"""Norms that are found by running them: their layer, their eps and their weight."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.matching.module_settings import codes_in, names_read
from kernels_ext_npu.matching.watched_runs import MAGNITUDES, are_same, check_sizes, is_close, takes_one_tensor
from kernels_ext_npu.matching.watched_runs import run as run_forward

_CAST = "_to_copy"
_MEANS = {"mean", "sum", "norm", "vector_norm", "rms_norm"}


def find_norm(module: nn.Module) -> tuple[str, tuple[tuple[str, Any], ...]] | None:
    """Return the layer of a norm, its eps and the name of its weight, if it has one."""
    names = [name for name, parameter in module._parameters.items() if parameter is not None]
    if len(names) > 1 or not takes_one_tensor(module):
        return None
    if not names and _MEANS.isdisjoint(names_read(type(module), type(module).forward)):  # type: ignore[arg-type]
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
        probes = [x * s for s in (1e-3, *MAGNITUDES)] + [x[:1, :1], x[0], x[None]]
        for probe, training, with_grad in product(probes, (False, True), (False, True)):
            arguments = [each.clone().requires_grad_(with_grad) for each in (probe, *(() if w is None else (w,)))]
            with torch.set_grad_enabled(with_grad):
                found = run(arguments[0], None if w is None else arguments[1], training)
                normed = arguments[0] * torch.rsqrt(arguments[0].square().mean(-1, keepdim=True) + eps)
                if not are_same(found, normed * _SCALES[kind](arguments[-1]), arguments):
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
    numbers |= {number for code in codes_in(type(module)) for number in code.co_consts if isinstance(number, float)}
    for x, normed in results:
        mean, factor = x.square().mean(-1, keepdim=True), normed / x
        if not is_close(factor, factor[..., :1].expand_as(factor), 1e-4):  # another mean, or not the last dimension
            return None
        solved = (factor[..., :1].pow(-2) - mean).mean()
        near = {n for n in numbers if abs(n - solved) <= 1e-4 * (n + mean.max())}
        candidates = near if candidates is None else candidates & near
    return min(candidates) if candidates else None
