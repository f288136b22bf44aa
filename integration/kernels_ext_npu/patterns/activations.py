"""The activations of transformers that are written out in several operators, and that one launch computes."""

import math

from kernels_ext_npu.patterns.pattern import Guard, Pattern

_ROOT = Guard(
    lambda module: module.precomputed_constant == math.sqrt(2 / math.pi),
    "its factor is {0.precomputed_constant!r}, that of the kernel is the root of 2 / pi",
)
PATTERNS = (
    Pattern("activations:NewGELUActivation", ("NewGELU",)),
    Pattern("activations:AccurateGELUActivation", ("NewGELU",), guard=_ROOT),
    Pattern("activations:FastGELUActivation", ("FastGELU",)),
    Pattern("bloom:BloomGelu", ("FastGELU",)),
    Pattern("activations:QuickGELUActivation", ("QuickGELU",)),
)
