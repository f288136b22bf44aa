"""Every layer of the kernels, forward and backward, in every dtype, against what it replaces: the list of the selftest.

That is the forward as transformers writes it, in float64 on the CPU, of modules with random weights.
"""

from types import ModuleType

import pytest
import torch
from torch import nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.selftest import comparing
from kernels_ext_npu.selftest.cases import Layer
from kernels_ext_npu.selftest.layers.layer_cases import CASES


def test_the_list_is_complete(kernels: dict[str, ModuleType]) -> None:
    assert {case.name for case in CASES} == set(LAYERS)
    for layer, repository in LAYERS.items():
        assert issubclass(getattr(kernels[repository].layers, layer), nn.Module)


@pytest.mark.parametrize("dtype", comparing.DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_layer_is_what_float64_gives(kernels, largest, case: Layer, dtype: torch.dtype) -> None:
    difference = case.compare(kernels[case.repository], dtype).largest
    largest("layers", dtype, difference)
    assert difference <= comparing.TOLERANCE[dtype]
