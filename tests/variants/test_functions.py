"""Every function of the kernels, forward and backward, in every dtype, against float64: the list of the selftest."""

from types import ModuleType

import pytest
import torch

from kernels_ext_npu.selftest import comparing, functions
from kernels_ext_npu.selftest.cases import Function

# what every machine has to take; arguments at limits are the selftest's
FUNCTIONS = [function for function in functions.FUNCTIONS if not function.at]
# they compute nothing, or call or are parts of what is called here
OTHERS = {
    "SWIGLU",
    "Adapter",
    "add_then_norm",
    "takes_sum",
    "Shard",
    "Gate",
    "QuantizedWeight",
    "alignment",
    "expert_activation",
    "expert_lists",
    "layers",
    "packing",
    "read_together",
    "reads_chosen_in_place",
}


def test_the_list_is_complete(kernels: dict[str, ModuleType]) -> None:
    listed = {(function.repository, function.name) for function in FUNCTIONS}
    assert listed == {(name, f) for name, kernel in kernels.items() for f in kernel.__all__ if f not in OTHERS}
    assert {(function.repository, function.name) for function in functions.FUNCTIONS} == listed


@pytest.mark.parametrize("dtype", comparing.DTYPES, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: f"{function.repository}-{function.name}")
def test_it_is_what_float64_gives(kernels, largest, function: Function, dtype: torch.dtype) -> None:
    difference = function.compare(kernels[function.repository], dtype).largest
    largest("functions", dtype, difference)
    assert difference <= comparing.TOLERANCE[dtype]
