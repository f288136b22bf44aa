"""Compare results and gradients on the device with float64 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

ROOT = Path(__file__).resolve().parent.parent.parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A value goes through at most eight roundings to its dtype, forward and backward; of float32, sums of some hundred
# terms differ in their order besides. Relative to the norm of what is compared.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 8 * 2**-11, torch.bfloat16: 8 * 2**-8}


def moved(arguments: Any) -> Any:
    """Move all tensors of the arguments to the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to("npu"), arguments)


def doubled(arguments: Any) -> Any:
    """Turn all tensors of the arguments into float64, but for those that hold no numbers to compute with."""
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, arguments)


@contextmanager
def wide() -> Iterator[None]:
    """Give float64, within the context, to what asks for float32."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        for name in ("float", "float32"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        yield


def results(call: Callable, arguments: tuple, parameters: Iterable[Tensor] = ()) -> list[Tensor | None]:
    """Return what a call returns, and the gradients of its arguments and of parameters: None for one that has none."""
    leaves = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), tuple(arguments))
    parameters = [*(leaf for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)), *parameters]
    for parameter in parameters:
        parameter.grad = None
    outputs = [output for output in tree_leaves(call(*leaves)) if isinstance(output, Tensor)]
    trained = [output for output in outputs if output.requires_grad]
    ramps = [torch.linspace(-1, 1, output.numel()).view(output.shape).to(output) for output in trained]
    torch.autograd.backward(trained, ramps)
    gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
    assert any(gradient is not None for gradient in gradients)
    return [*(output.detach() for output in outputs), *gradients]


def distance(found: list[Tensor | None], exact: list[Tensor | None]) -> float:
    """Return the largest of all differences, each in relation to the norm of what it should be.

    Where nothing was computed with a parameter, one side may have no gradient, and the other zeros.
    """
    assert len(found) == len(exact)
    return max(_distance(a, b) for a, b in zip(found, exact))


def _distance(found: Tensor | None, exact: Tensor | None) -> float:
    if found is None or exact is None:
        return 0.0 if all(t is None or not t.any() for t in (found, exact)) else float("inf")
    assert found.shape == exact.shape
    wide = torch.complex128 if exact.is_complex() else torch.float64
    found, exact = found.cpu().to(wide), exact.to(wide)
    relative = ((found - exact).norm() / exact.norm().clamp(min=1e-30)).item()
    return float("inf") if math.isnan(relative) else relative  # max() would lose it
