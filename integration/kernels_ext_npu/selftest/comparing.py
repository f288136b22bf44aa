"""Compares results and gradients on the device with those of formulas in float64 on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map, tree_map_only

from kernels_ext_npu.measuring.distance import distances, tensors, worst

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A value goes through at most eight roundings to its dtype, forward and backward; of float32, sums of some hundred
# terms differ in their order besides. Relative to the norm of what is compared.
TOLERANCE = {torch.float32: 4e-6, torch.float16: 8 * 2**-11, torch.bfloat16: 8 * 2**-8}
WIDE = {torch.complex64: torch.complex128}


class Results(NamedTuple):
    """Hold what a call gives, and the gradients of what it was given: None for what has none.

    On the device outputs are there twice: those of a call with gradients, then those of one without, which may be
    computed by other operators.
    """

    outputs: Sequence[Tensor]
    gradients: Sequence[Tensor | None]


class Difference(NamedTuple):
    """Hold the largest difference of an output, and of a gradient, each relative to the norm of what it should be."""

    forward: float
    backward: float

    @property
    def largest(self) -> float:
        """The larger one, infinite if one is no number."""
        return worst(self)


class InPlaceOfFloat32(TorchFunctionMode):
    """A context that gives a dtype to what asks for float32: models compute parts in it, whatever comes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is Tensor.float:
            return args[0].to(self.dtype)
        args, kwargs = tree_map(lambda value: self.dtype if value is torch.float32 else value, (args, kwargs or {}))
        return function(*args, **kwargs)


def moved(arguments: Any, device: str = "npu") -> Any:
    """Move all tensors of the arguments to a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), arguments)


def doubled(arguments: Any) -> Any:
    """Turn all tensors of the arguments into twice their precision, but for those that hold no numbers."""
    return tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t.to(WIDE.get(t.dtype, t.dtype)), arguments
    )


def rounded(arguments: Any, dtype: torch.dtype) -> Any:
    """Round all floating tensors of the arguments to a dtype."""
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, arguments)


def results(call: Callable, arguments: tuple, parameters: Iterable[Tensor] = ()) -> Results:
    """Return what a call returns, and the gradients of its arguments and of parameters."""
    leaves = tree_map_only(Tensor, lambda t: t.detach().clone().requires_grad_(t.is_floating_point()), tuple(arguments))
    parameters = [*tensors(leaves), *parameters]
    for parameter in parameters:
        parameter.grad = None
    outputs = tensors(call(*leaves))
    trained = [output for output in outputs if output.requires_grad]
    ramps = [torch.linspace(-1, 1, output.numel()).view(output.shape).to(output) for output in trained]
    torch.autograd.backward(trained, ramps)
    gradients = [parameter.grad for parameter in parameters if parameter.requires_grad]
    if all(gradient is None for gradient in gradients):
        raise AssertionError("nothing has a gradient")
    outputs = [output.detach() for output in outputs]
    if any(parameter.device.type == "npu" for parameter in parameters):
        with torch.no_grad():
            outputs += tensors(call(*tree_map_only(Tensor, torch.detach, leaves)))
    return Results(outputs, gradients)


def exact(call: Callable, arguments: tuple, parameters: Iterable[Tensor] = ()) -> Results:
    """Return the same in float64, of arguments on the host; parameters have to be of float64."""
    with InPlaceOfFloat32(torch.float64):
        return results(call, doubled(arguments), parameters)


def difference(found: Results, expected: Results) -> Difference:
    """Return how far results are from what they should be; outputs of the device may be there twice."""
    times = max(1, len(found.outputs) // max(1, len(expected.outputs)))
    return Difference(
        _worst("output", found.outputs, [*expected.outputs] * times),
        _worst("gradient", found.gradients, expected.gradients),
    )


def _worst(kind: str, found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    if len(found) != len(expected):
        raise AssertionError(f"{len(found)} tensors, where there are to be {len(expected)}")
    named = [{f"{kind} {i}": tensor for i, tensor in enumerate(tensors)} for tensors in (found, expected)]
    return worst(measured.norm for measured in distances(*named).values())
