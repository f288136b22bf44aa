"""Mark tests that count what a certain release of transformers holds."""

import pytest
import transformers

from kernels_ext_npu.matching.classification import COUNTED

counted = pytest.mark.skipif(transformers.__version__ != COUNTED, reason=f"what {COUNTED} holds was counted")
