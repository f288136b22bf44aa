"""Let a router of other people's code, which was found by running it, choose experts by the functions of FusedMoE."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels_ext_npu.reasons import Reason
from kernels_ext_npu.recognition.routers.formulas import Dtypes, Gating, Router, spread

_TRAINS_OTHERWISE = Reason("training", "but it is trained, and computes something else then than in inference")


def why_aside(module: nn.Module, router: Router) -> Reason | None:
    """Say why a router computes itself as it is now, although the kernel is in its place; None if it does not."""
    if module.training and not router.trains:
        return _TRAINS_OTHERWISE
    weight = _at(module, router.weight)
    dtype = getattr(weight, "dtype", None)
    if dtype not in {dtypes.weight for dtypes in router.dtypes}:
        return Reason("rounding", f"but with a weight in {dtype} it is not known to round as the operator does")
    return None


def make_router_forward(package: ModuleType, router: Router, matched: FunctionType) -> FunctionType:
    """Return the forward that chooses as a router does; what it is not known to take the forward of the class computes.

    Args:
        package: of the kernel FusedMoE.
        router: what was found.
        matched: the forward of the class.
    """
    known = {(dtypes.x, dtypes.weight): dtypes for dtypes in router.dtypes}
    choose = choose_by(package, router.gating, router.bias is not None)
    at = 0 if router.is_transposed else -1  # where in its shape the weight has the width
    dims = frozenset(router.dims)  # torch.compile takes numbers in a tuple for sizes that are not known

    def forward(self: nn.Module, x: Tensor) -> Any:
        weight = _at(self, router.weight)
        dtypes = known.get((x.dtype, weight.dtype)) if isinstance(weight, Tensor) else None
        is_aside = self.training and not router.trains
        if not router.has_gradient and torch.is_grad_enabled():
            is_aside |= any(each.requires_grad for each in (x, *self.parameters()))
        if dtypes is None or x.dim() not in dims or x.shape[-1] != weight.shape[at] or is_aside:
            return matched(self, x)
        rows = x.reshape(-1, x.shape[-1])
        offset, bias = (None if path is None else _at(self, path) for path in (router.offset, router.bias))
        if router.child is not None:
            logits = self._modules[router.child](rows.to(dtypes.product))  # type: ignore[misc]
            if logits.dtype is not dtypes.product:  # another layer has been put there
                return matched(self, x)
        else:
            logits = _multiply(package, rows, weight.t() if router.is_transposed else weight, offset, dtypes)
        weights, experts = choose(logits, bias)
        made = {"logits": logits, "weights": weights, "experts": experts}
        if any(output.what == "spread" for output in router.outputs):
            made["spread"] = spread(weights, experts, logits)
        results: list[Any] = []
        for output, dtype in zip(router.outputs, dtypes.outputs):
            if output.what == "constant":
                results.append(output.value)
            elif output.what == "zero":
                results.append(x.new_zeros(output.value, dtype=dtype))
            else:
                y = made[output.what] if output.what in made else router.gating.score(logits.float())
                results.append((y if output.is_flat else y.unflatten(0, x.shape[:-1])).to(dtype))
        return tuple(results)

    return forward  # type: ignore[return-value]


def _at(module: Any, path: str) -> Any:
    """Return what a module or one of its children has under a path; None if nothing."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _multiply(package: ModuleType, x: Tensor, weight: Tensor, offset: Tensor | None, dtypes: Dtypes) -> Tensor:
    """Return logits ``[T, E]``."""
    product = dtypes.product
    if product is torch.float32:
        logits = package.float32_logits(x, weight)
        return logits if offset is None else logits + offset.flatten()
    return F.linear(x.to(product), weight.to(product), None if offset is None else offset.flatten().to(product))


def choose_by(package: ModuleType, gating: Gating, has_bias: bool) -> Callable[[Tensor, Tensor | None], tuple]:
    """Return the function of logits and a bias that gives weights and experts."""
    is_plain = gating.scores == "softmax" and gating.groups == 1 and not has_bias and not gating.epsilon

    def choose(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        if is_plain:
            weights, experts = package.softmax_top_k(logits, gating.k, gating.renormalise)
            return weights if gating.scale == 1 else weights * gating.scale, experts
        bias = None if bias is None else bias.flatten()
        return package.gating_top_k(logits.float(), bias=bias, **gating._asdict())

    return choose
