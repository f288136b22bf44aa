"""Compares results and gradients on the device with those of formulas in float64 on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A value goes through at most eight roundings to its dtype, forward and backward; of float32, sums of some hundred
# terms differ in their order besides. Relative to the norm of what is compared.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 8 * 2**-11, torch.bfloat16: 8 * 2**-8}


class Results(NamedTuple):
    """Hold what a call gives, and the gradients of what it was given: None for what has none.

    On the device outputs are there twice: those of a call with gradients, then those of one without, which may be
    computed by other operators.
    """

    outputs: list[Tensor]
    gradients: list[Tensor | None]


class Difference(NamedTuple):
    """Hold the largest difference of an output, and of a gradient, each relative to the norm of what it should be."""

    forward: float
    backward: float

    @property
    def largest(self) -> float:
        """The larger one; a difference that is not a number is infinite, which max() would lose."""
        return math.inf if any(map(math.isnan, self)) else max(self)


def moved(arguments: Any) -> Any:
    """Move all tensors of the arguments to the device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to("npu"), arguments)


def doubled(arguments: Any) -> Any:
    """Turn all tensors of the arguments into float64, but for those that hold no numbers to compute with."""
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, arguments)


def rounded(arguments: Any, dtype: torch.dtype) -> Any:
    """Round all floating tensors of the arguments to a dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, arguments)


@contextmanager
def wide() -> Iterator[None]:
    """Give float64, within the context, to what asks for float32."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        for name in ("float", "float32"):
            stack.enter_context(mock.patch.object(torch, name, torch.float64))
        yield


def results(call: Callable, arguments: tuple, parameters: Iterable[Tensor] = ()) -> Results:
    """Return what a call returns, and the gradients of its arguments and of parameters."""
    leaves = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), tuple(arguments))
    parameters = [*(leaf for leaf in tree_leaves(leaves) if isinstance(leaf, Tensor)), *parameters]
    for parameter in parameters:
        parameter.grad = None
    outputs = [output for output in tree_leaves(call(*leaves)) if isinstance(output, Tensor)]
    trained = [output for output in outputs if output.requires_grad]
    ramps = [torch.linspace(-1, 1, output.numel()).view(output.shape).to(output) for output in trained]
    torch.autograd.backward(trained, ramps)
    gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
    if all(gradient is None for gradient in gradients):
        raise AssertionError("nothing has a gradient")
    outputs = [output.detach() for output in outputs]
    if any(parameter.device.type == "npu" for parameter in parameters):
        with torch.no_grad():
            again = call(*(tree_map_only(Tensor, torch.detach, leaf) for leaf in leaves))
        outputs += [output for output in tree_leaves(again) if isinstance(output, Tensor)]
    return Results(outputs, gradients)


def difference(found: Results, exact: Results) -> Difference:
    """Return how far results are from what they should be; outputs of the device may be there twice."""
    times = max(1, len(found.outputs) // max(1, len(exact.outputs)))
    return Difference(distance(found.outputs, exact.outputs * times), distance(found.gradients, exact.gradients))


def distance(found: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> float:
    """Return the largest of all differences, each in relation to the norm of what it should be; of none, zero.

    Where it should be zero, and others should not, the largest norm of these takes its place. Where nothing was
    computed with a parameter, one side may have no gradient, and the other zeros.
    """
    if len(found) != len(exact):
        raise AssertionError(f"{len(found)} tensors, where there are to be {len(exact)}")
    numbers = [tensor for tensor in exact if tensor is not None and (tensor.is_floating_point() or tensor.is_complex())]
    whole = max((float(tensor.norm()) for tensor in numbers), default=0.0)
    return max((_distance(a, b, whole) for a, b in zip(found, exact)), default=0.0)


def _distance(found: Tensor | None, exact: Tensor | None, whole: float) -> float:
    if found is None or exact is None:
        return 0.0 if all(t is None or not t.any() for t in (found, exact)) else math.inf
    if found.shape != exact.shape:
        raise AssertionError(f"a result is {list(found.shape)}, and has to be {list(exact.shape)}")
    wide = torch.complex128 if exact.is_complex() else torch.float64
    found, exact = found.cpu().to(wide), exact.to(wide)
    norm = float(exact.norm())
    # what is zero in mathematics, such as the gradient of a query that sees one key, is rounding errors of the others
    norm = norm if norm > 1e-12 * whole else max(norm, whole, 1e-30)
    relative = float((found - exact).norm()) / norm
    return math.inf if math.isnan(relative) else relative  # max() would lose it
