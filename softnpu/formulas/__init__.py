"""Define ``npu::`` operators as reference formulas over CPU tensors, one file a family.

A formula has the parameters of the operator's schema and returns what the operator returns, with its shapes,
dtypes and rounding. It refuses what the device refuses. Operators without a formula raise an error that names them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

import torch

from softnpu.host_kernel import on_host, refusal
from softnpu.kernel_registration import replace_kernel
from softnpu.out_of_reach import reason
from softnpu.schema_adapter import adapted

npu = torch.library.Library("npu", "IMPL")
FORMULAS: dict[str, Callable] = {}

# These stay with torch_npu. Memory formats launch no kernel for ND tensors, the only ones here; the gradients are
# composed of aten operators.
NATIVE = {
    "_npu_format_cast", "copy_memory_", "fft_c2r_backward", "fft_r2c_backward", "get_npu_format", "get_storage_size",
    "npu_change_data_ptr", "npu_format_cast", "npu_format_cast.Tensor", "npu_format_cast_",
    "npu_format_cast_.acl_format", "npu_gather_backward", "stft_backward",
}  # fmt: skip
# So do these, in the releases that have the operator that they call.
COMPOSED = {
    "npu_moe_token_unpermute": "_npu_moe_token_unpermute",
    "npu_moe_token_unpermute_with_routing_map": "_npu_moe_token_unpermute_with_routing_map",
}


# Casts to an internal format with a dtype of its own for the format's blocks: over the bytes of ND, the plain cast.
FORMAT_CASTS = ("_npu_format_cast.aclnn", "_npu_format_cast.input_dtype")


def formula(function: Callable) -> Callable:
    """Register a function as the device's form of the ``npu::`` operator with its name."""
    FORMULAS[function.__name__] = function
    return function


def named_formula(name: str) -> Callable:
    """Register the function below as the form of an overload: ``npu_grouped_matmul.List``."""

    def register(function: Callable) -> Callable:
        FORMULAS[name] = function
        return function

    return register


def install() -> None:
    """Put the formulas in place, and refusals for the operators that have none."""
    for family in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{family.name}")  # formulas register themselves
    for registration in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, name = registration.partition("::")
        if namespace != "npu" or name in NATIVE or hasattr(torch.ops.npu, COMPOSED.get(name, "")):
            continue
        if name in FORMAT_CASTS:
            kernel = _cast_format
        elif name in FORMULAS:
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.npu, base), overload or "default")
            kernel = on_host(op, adapted(op, FORMULAS[name]))
        else:
            kernel = refusal(registration, reason(name))
        replace_kernel(npu, name, kernel)


def _cast_format(input: torch.Tensor, acl_format: int, customize_dtype: int, *input_dtype: int) -> torch.Tensor:
    return torch.ops.npu._npu_format_cast(input, acl_format)
