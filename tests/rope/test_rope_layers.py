"""Every layer against the functions of transformers that it replaces: values, gradients, dtypes, launches."""

from collections.abc import Callable
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from kernels_ext_npu.matching.lookup import find_pattern
from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.patterns import rope_tables
from kernels_ext_npu.patterns.collection import FUNCTION_PATTERNS
from kernels_ext_npu.patterns.pattern import Pattern
from kernels_ext_npu.selftest.comparing import InPlaceOfFloat32, doubled
from kernels_ext_npu.selftest.layers.bare_modules import original
from kernels_ext_npu.selftest.layers.rotary_arguments import TABLES, arguments
from kernels_ext_npu.transformers_internals import original_function
from tests.support import npu_counts
from tests.support.swapped import assert_no_further
from tests.support.transformers_files import code, rotary_functions

PATTERNS = [reference for reference in FUNCTION_PATTERNS if reference.repository == "RoPE"]
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
DTYPES = [(BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)]


@cache
def served() -> list[tuple[str, Callable, Pattern]]:
    """The functions of transformers, of those written alike one, and the references: one is of earlier releases."""
    differing = {code(original_function(f)): (name, f) for name, f in rotary_functions().items()}
    found = [(name, original_function(f), find_pattern(f)) for name, f in differing.values()]
    own = [(reference.name, original(reference.name), reference) for reference in PATTERNS]
    return [(name, function, reference) for name, function, reference in (*found, *own) if reference is not None]


def moved(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.to("npu") if isinstance(value, Tensor) else value for name, value in inputs.items()}


def results(function: Callable, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return what a function returns, and the gradients of what it rotates."""
    leaves = tree_map_only(Tensor, torch.detach, inputs)
    rotated = [
        leaf.requires_grad_() for name, leaf in leaves.items() if name not in TABLES and isinstance(leaf, Tensor)
    ]
    outputs = tensors(function(**leaves))
    directions = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out) for out in outputs]
    return [*(out.detach() for out in outputs), *torch.autograd.grad(outputs, rotated, directions)]


def test_all_layers_of_the_repository_have_a_reference_and_its_parameters(kernel: ModuleType) -> None:
    import inspect

    layers = {layer for table in rope_tables.PATTERNS for layer in table.layers}
    assert {reference.layers[0] for reference in PATTERNS} | layers == {
        name for name, each in vars(kernel.layers).items() if isinstance(each, type)
    }
    for table in rope_tables.PATTERNS:
        forwards = (original(table.name).forward, getattr(kernel.layers, table.layers[0]).forward)
        assert len({tuple(inspect.signature(forward).parameters) for forward in forwards}) == 1
    for reference in PATTERNS:
        parameters = list(inspect.signature(getattr(kernel.layers, reference.layers[0]).forward).parameters.values())
        expected = list(inspect.signature(original(reference.name)).parameters.values())
        assert [(p.name, p.kind, p.default) for p in parameters[1:]] == [(p.name, p.kind, p.default) for p in expected]


@pytest.mark.parametrize("dtypes", [*DTYPES[:2], pytest.param(DTYPES[2], marks=pytest.mark.long), (FLOAT32, FLOAT32)])
def test_each_result_is_no_further_from_float64_than_the_originals(kernel: ModuleType, subtests, dtypes) -> None:
    """Each result and gradient, to 1e-3 and 1e-6 of the norm: products and sums in float32, in another order."""
    for name, function, reference in served():
        with subtests.test(name):
            inputs = arguments(reference.name, *dtypes)
            layer = getattr(kernel.layers, reference.layers[0])()
            found = results(layer, moved(inputs))
            with InPlaceOfFloat32(torch.float64):
                truth = results(function, doubled(inputs))
            for each in zip(found, results(function, inputs), truth, strict=True):
                assert_no_further(*([tensor] for tensor in each), slack=1e-3, least=1e-6)
            npu_counts.reset()
            results(layer, moved(inputs))
            counters = npu_counts.read()
            assert counters["stream_syncs"] == 0
            if dtypes[0] is dtypes[1]:
                assert counters["npu_rotary_mul"] == counters["npu_rotary_mul_backward"] == len(found) // 2


@pytest.mark.parametrize(
    "dtypes", [*DTYPES, (FLOAT32, FLOAT32), (torch.float64, torch.float64), (FLOAT32, torch.float64)]
)
def test_on_the_cpu_the_result_is_the_originals_to_the_bit(kernel: ModuleType, subtests, dtypes) -> None:
    for name, function, reference in served():
        with subtests.test(name):
            inputs = arguments(reference.name, *dtypes)
            layer = getattr(kernel.layers, reference.layers[0])()
            with torch.no_grad():
                for a, b in zip(tensors(layer(**inputs)), tensors(function(**inputs)), strict=True):
                    assert a.dtype == b.dtype
                    assert torch.equal(a, b)


def test_tables_for_heads_in_another_place_are_refused(kernel: ModuleType) -> None:
    """``cos[:, None, :]`` is one for all heads of ``[S, N, D]`` where cos is ``[S, R]``, of ``[B, N, S, D]`` else."""
    x, table = torch.ones(2, 4, 4, 16), torch.ones(2, 4, 8)
    with pytest.raises(ValueError, match=r"cos \[2, 4, 8\] must have two dimensions"):
        kernel.layers.VisionRotaryPosEmbPartial()(x, x, table, table)


def test_arguments_may_be_missing_where_transformers_lets_them(kernel: ModuleType) -> None:
    for reference in PATTERNS:
        if reference.name.startswith(("qwen4_exp:", "mistral_large4:")):
            inputs = arguments(reference.name, FLOAT32, FLOAT32) | {"k": None}
            found = getattr(kernel.layers, reference.layers[0])()(**moved(inputs))
            expected = original(reference.name)(**inputs)
            assert type(found) is type(expected)
            torch.testing.assert_close(tensors(found)[0].cpu(), tensors(expected)[0], rtol=1e-6, atol=1e-6)
