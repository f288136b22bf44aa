"""Without rows, tokens, sequences or images nothing is computed, and the graph of autograd stays.

A rank without tokens or a micro batch without pictures goes through the same backward as the others, and its weights
have gradients of zeros, for optimizers and collectives that expect one. What has a gradient is told by the formula in
torch, on the CPU in float64.
"""

import copy
from functools import partial
from types import MethodType

import pytest
import torch
from torch import Tensor, nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.selftest import comparing, functions
from kernels_ext_npu.selftest.comparing import Results
from kernels_ext_npu.selftest.layers import layer_cases, rotary_arguments
from tests.all_kernels.empty_calls import CASES, WITHOUT_GRADIENTS, Case
from tests.support.local_kernels import kernel

ROTATIONS = [pattern for pattern in FUNCTION_PATTERNS if pattern.repository == "RoPE"]
ONE_IMAGE = {"inkling2:apply_rotary_pos_emb_vision", "qwen2_vl:apply_rotary_pos_emb_vision"}  # without rows
REPOSITORY = {function.name: function.repository for function in functions.FUNCTIONS}


def assert_same_graph(found: Results, expected: Results) -> None:
    """Compare outputs, of which ours are there with gradients and without, and gradients, where the formula has any."""
    times = len(found.outputs) // len(expected.outputs)
    for ours, own in zip(found.outputs, [*expected.outputs] * times, strict=True):
        torch.testing.assert_close(ours.cpu(), own.to(ours.dtype), equal_nan=True)
    for ours, own in zip(found.gradients, expected.gradients, strict=True):
        if own is not None:
            assert ours is not None
            torch.testing.assert_close(ours.cpu(), own.to(ours.dtype))


def test_no_function_is_left_out() -> None:
    assert {case.name for case in CASES} == set(REPOSITORY) - WITHOUT_GRADIENTS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{'-'.join(map(str, case.shapes))}")
def test_a_function_keeps_its_graph(case: Case, dtype: torch.dtype) -> None:
    function = getattr(kernel(REPOSITORY[case.name]), case.name)
    tensors = tuple(torch.ones(shape, dtype=dtype) for shape in case.shapes)
    found = comparing.results(partial(case.call, function), comparing.moved(tensors))
    assert_same_graph(found, comparing.exact(case.formula, tensors))


def emptied(arguments: tuple[Tensor, ...], dimension: int) -> tuple[Tensor, ...]:
    """Cut a dimension of the first argument to nothing, and that of all that are as long in it."""
    length = arguments[0].shape[dimension]
    return tuple(
        x.narrow(dimension, 0, 0) if x.dim() > dimension and x.shape[dimension] == length else x for x in arguments
    )


def wanted(module: nn.Module, *calls: tuple[Tensor, ...]) -> list[bool]:
    """Tell which gradients there are of the first of several calls that a module takes."""
    for given in calls:
        called = copy.deepcopy(module)
        try:
            found = comparing.results(called, given, called.parameters())
        except (AssertionError, IndexError, RuntimeError):  # some take no rows, or have no gradient of none
            continue
        return [gradient is not None for gradient in found.gradients]
    raise AssertionError("it has no gradients")


@pytest.mark.parametrize(
    ("layer", "number"), [(layer, n) for layer, made in layer_cases.MODULES.items() for n in range(len(made))]
)
def test_a_layer_gives_zeros_to_what_has_gradients(layer: str, number: int) -> None:
    module, arguments = layer_cases.MODULES[layer][number]()
    for dimension in range(min(2, arguments[0].dim() - 1)):  # of rows
        given = emptied(arguments, dimension)
        ours = copy.deepcopy(module).to("npu")
        ours.forward = MethodType(getattr(kernel(LAYERS[layer]).layers, layer).forward, ours)
        try:
            found = comparing.results(ours, comparing.moved(given), ours.parameters())
        except RuntimeError:  # of a part of the module that the layer calls, as the original does
            with pytest.raises(RuntimeError):
                module(*given)
            continue
        trained = [x for x in given if x.is_floating_point()] + [x for x in module.parameters() if x.requires_grad]
        for is_wanted, gradient, x in zip(wanted(module, given, arguments), found.gradients, trained, strict=True):
            assert (gradient is not None) == is_wanted
            assert gradient is None or gradient.cpu().equal(torch.zeros_like(x))


@pytest.mark.parametrize(
    ("pattern", "batch", "positions"),
    [
        *((pattern, 2, 0) for pattern in ROTATIONS),
        *((pattern, 0, 6) for pattern in ROTATIONS if pattern.name not in ONE_IMAGE),
    ],
    ids=lambda value: value.name if isinstance(value, Pattern) else str(value),
)
def test_a_rotation_keeps_its_graph(monkeypatch, pattern: Pattern, batch: int, positions: int) -> None:
    monkeypatch.setattr(rotary_arguments, "B", batch)
    given = rotary_arguments.arguments(pattern.name, torch.float32, torch.float32, positions)
    fixed = {name: given.pop(name) for name in [*given] if name in rotary_arguments.FIXED}
    layer = getattr(kernel("RoPE").layers, pattern.layers[0])()
    found = comparing.results(
        lambda *rotated: layer(**dict(zip(given, rotated)), **comparing.moved(fixed)),
        comparing.moved(tuple(given.values())),
    )
    shapes = [x.shape for x in given.values()]
    assert [None if gradient is None else gradient.shape for gradient in found.gradients] == shapes
