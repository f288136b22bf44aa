"""Registers the operators with bitsandbytes, which calls `register` when it is imported.

bitsandbytes loads the entry points of the group ``bitsandbytes.backends``, and takes kernels for a device by
``register_kernel``: https://github.com/bitsandbytes-foundation/bitsandbytes, ``bitsandbytes/__init__.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

GROUP = "bitsandbytes.backends"
# bitsandbytes' formulas for the CPU, which compute on any device and call the operators above
_DEVICE_GENERIC = {
    "optimizer_update_32bit": "_optimizer_update_32bit_cpu",
    "optimizer_update_8bit_blockwise": "_optimizer_update_8bit_blockwise_cpu",
}


def register() -> None:
    """Register the operators for the NPU; do nothing where torch has no such device, or they are registered.

    What a release of bitsandbytes does not define is left out.
    """
    if torch._C._get_privateuse1_backend_name() != "npu" or is_registered():
        return
    from bitsandbytes._ops import register_kernel
    from bitsandbytes.backends.cpu import ops as any_device

    for name, kernel in _kernels().items():
        if _exists(name):
            register_kernel(f"bitsandbytes::{name}", "npu")(kernel)
    for name, function in _DEVICE_GENERIC.items():
        if _exists(name) and hasattr(any_device, function):
            register_kernel(f"bitsandbytes::{name}", "npu")(getattr(any_device, function))


def is_registered() -> bool:
    """Tell whether bitsandbytes has these operators."""
    name = "bitsandbytes::dequantize_4bit"
    return _exists("dequantize_4bit") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1")


def composed(operator: torch._ops.OpOverload) -> Callable[..., Any] | None:
    """Return the function of operators that computes an operator of bitsandbytes here; None for any other operator."""
    if operator.namespace != "bitsandbytes" or not is_registered():
        return None
    name, _, overload = operator.name().partition("::")[2].partition(".")
    return _kernels().get(f"{name}.{overload}" if overload else name)


def _exists(name: str) -> bool:
    """Tell whether this release of bitsandbytes defines an operator, or an overload of one: ``name.out``."""
    operator, _, overload = name.partition(".")
    found = getattr(torch.ops.bitsandbytes, operator, None)
    return found is not None and (overload or "default") in found.overloads()


@functools.cache
def _kernels() -> dict[str, Callable[..., Any]]:
    """Return the operators by their names in the namespace of bitsandbytes."""
    from kernels_ext_npu.bitsandbytes_backend import four_bit, int8

    return {
        "quantize_4bit": four_bit.quantize_4bit,
        "dequantize_4bit": four_bit.dequantize_4bit,
        "dequantize_4bit.out": four_bit.dequantize_4bit_out,
        "gemv_4bit": four_bit.gemv_4bit,
        "gemv_4bit.out": four_bit.gemv_4bit_out,
        "gemm_4bit": four_bit.gemm_4bit,
        "quantize_blockwise": four_bit.quantize_blockwise,
        "dequantize_blockwise": four_bit.dequantize_blockwise,
        "dequantize_blockwise.out": four_bit.dequantize_blockwise_out,
        "int8_vectorwise_quant": int8.int8_vectorwise_quant,
        "int8_linear_matmul": int8.int8_linear_matmul,
        "int8_linear_matmul.out": int8.int8_linear_matmul_out,
        "int8_scaled_mm": int8.int8_scaled_mm,
        "int8_mixed_scaled_mm": int8.int8_mixed_scaled_mm,
    }
