"""Every function and layer of the kernels is one graph under torch.compile, forward and backward.

It gives what its formula gives in float64, and launches the operators that it launches without a graph.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.selftest import comparing, functions
from kernels_ext_npu.selftest.cases import Function, Layer
from kernels_ext_npu.selftest.layers.layer_cases import CASES
from tests.support import npu_counts
from tests.support.local_kernels import kernel

# two of modules that their cases make, which no graph does, and one that looks where weights lie before it
OUTSIDE = ("experts_forward", "attention_forward", "lora_pair")
FUNCTIONS = [function for function in functions.FUNCTIONS if not function.at and function.name not in OUTSIDE]
LOOKS = "ScaledTokensMoEBlock"  # at values of its activation, once
# graphs with sizes that are not known, of some, and those that take long, of which other tests have graphs of a kind
QUICKLY = {"rms_norm", "gating_top_k"}
SLOWLY = {"chunk_gated_delta_rule", "chunk_kda", "selective_scan_fn", "linear_recurrence", "hyper_connection"}
SLOWLY |= {"linear_cross_entropy", "linear_log_probs_and_entropy", "linear_generalized_jsd"}
SIZES = [
    pytest.param(function, is_dynamic, marks=[pytest.mark.long] * (function.name in late))
    for is_dynamic, late in ((False, SLOWLY), (True, {function.name for function in FUNCTIONS} - QUICKLY))
    for function in FUNCTIONS
]


def in_a_graph(function: Callable, is_dynamic: bool = False) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=is_dynamic)


def operators(call: Callable, given: tuple) -> dict[str, int]:
    with torch.no_grad():
        call(*given)  # what the first call alone does
        npu_counts.reset()
        call(*given)
    return {name: count for name, count in npu_counts.read().items() if name.startswith("npu_")}


@pytest.mark.parametrize(("function", "is_dynamic"), SIZES, ids=lambda value: getattr(value, "name", str(value)))
def test_a_function_is_one_graph(function: Function, is_dynamic: bool) -> None:
    own = getattr(kernel(function.repository), function.name)

    def call(*given):
        return function.call(own, *given)

    compiled = in_a_graph(call, is_dynamic)
    same = replace(function, call=lambda _, *given: compiled(*given))
    assert same.compare(kernel(function.repository), torch.float32).largest <= comparing.TOLERANCE[torch.float32]
    given = comparing.moved(function.arguments())
    assert operators(compiled, given) == operators(call, given)


def layer_cases() -> list:
    """Return a case of each layer; most wait for a long run, since there are graphs of the functions that they call."""
    cases = {case.name: case for case in CASES if case.name != LOOKS}
    late = {name for number, name in enumerate(sorted(cases, key=LAYERS.get)) if number % 9}
    late |= {name for name in cases if LAYERS[name] == "LinearAttention"}
    return [pytest.param(case, marks=[pytest.mark.long] * (name in late), id=name) for name, case in cases.items()]


@pytest.mark.parametrize("case", layer_cases())
def test_a_layer_is_one_graph(case: Layer) -> None:
    layer: type[nn.Module] = getattr(kernel(case.repository).layers, case.name)
    members = {"forward": in_a_graph(layer.forward), "__module__": layer.__module__}
    found, expected = case.compute(type(case.name, (layer,), members), torch.float32)
    assert comparing.difference(found, expected).largest <= comparing.TOLERANCE[torch.float32]
