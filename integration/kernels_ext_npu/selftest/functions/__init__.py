"""The functions of all repositories, those of a family in a file of its own."""

from __future__ import annotations

from kernels_ext_npu.selftest.cases import Function
from kernels_ext_npu.selftest.functions import (
    attention,
    experts,
    linear_attention,
    linear_layers,
    losses,
    norms,
    rotary,
)

FUNCTIONS: tuple[Function, ...] = (
    *norms.FUNCTIONS,
    *rotary.FUNCTIONS,
    *experts.FUNCTIONS,
    *attention.FUNCTIONS,
    *losses.FUNCTIONS,
    *linear_attention.FUNCTIONS,
    *linear_layers.FUNCTIONS,
)
