"""The functions of all repositories, those of a family in a file of its own."""

from __future__ import annotations

from kernels_ext_npu.selftest import (
    attention_functions,
    linear_functions,
    loss_functions,
    moe_functions,
    norm_functions,
    projection_functions,
    rotary_functions,
)
from kernels_ext_npu.selftest.cases import Function

FUNCTIONS: tuple[Function, ...] = (
    *norm_functions.FUNCTIONS,
    *rotary_functions.FUNCTIONS,
    *moe_functions.FUNCTIONS,
    *attention_functions.FUNCTIONS,
    *loss_functions.FUNCTIONS,
    *linear_functions.FUNCTIONS,
    *projection_functions.FUNCTIONS,
)
