"""Every function of the kernels at every limit that selftest knows, forward and backward, in every dtype.

What every machine has to take is compared on every release, in tests/variants.
"""

import pytest

from kernels_ext_npu.selftest import comparing, functions
from kernels_ext_npu.selftest.cases import Function
from tests.support.local_kernels import kernel

AT_LIMITS = [function for function in functions.FUNCTIONS if function.at]


@pytest.mark.parametrize("function", AT_LIMITS, ids=lambda function: f"{function.repository}-{function.title}")
def test_it_is_what_float64_gives(function: Function) -> None:
    for dtype in comparing.DTYPES:
        difference = function.compare(kernel(function.repository), dtype).largest
        assert difference <= comparing.TOLERANCE[dtype], dtype
