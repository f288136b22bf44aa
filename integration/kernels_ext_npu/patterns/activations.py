"""The activations of transformers that are written out in several operators, and that one launch computes."""

import math
from typing import Any

from kernels_ext_npu.patterns.pattern import Pattern, require


def _has_root(module: Any) -> bool:
    return module.precomputed_constant == math.sqrt(2 / math.pi)


_ROOT = require(_has_root, "its factor is {0.precomputed_constant!r}, that of the kernel is the root of 2 / pi")
PATTERNS = (
    Pattern("activations:NewGELUActivation", ("NewGELU",)),
    Pattern("activations:AccurateGELUActivation", ("NewGELU",), _ROOT, holds=_has_root),
    Pattern("activations:FastGELUActivation", ("FastGELU",)),
    Pattern("bloom:BloomGelu", ("FastGELU",)),
    Pattern("activations:QuickGELUActivation", ("QuickGELU",)),
)
