"""Find the function inside a module that `kernels` made of it."""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

from torch import nn
from transformers.integrations import hub_kernels

from kernels_ext_npu.transformers_internals import cells

_KERNEL, _FALLBACK = "use_kernel_forward_from_hub", "use_kernel_func_from_hub_with_fallback"


def is_kernel_function(function: object) -> bool:
    """Tell whether an object is a module that `kernels` made of a function."""
    return isinstance(function, nn.Module) and type(function).__qualname__ == "_create_func_module.<locals>.Func"


def original_function(function: object) -> FunctionType | None:
    """Return the function itself, also where `kernels` made a module of it; None for what is neither."""
    held = _held(function)
    original = held.get("torch_function", held.get("func", function))
    return original if isinstance(original, FunctionType) else None


def package_function(function: object) -> Any:
    """Return what transformers calls of an installed package in place of a function; None where it calls its own."""
    held = _held(function)
    return held["implementation"] if held.get("is_new_implementation") else None


def allowed_decorators(function: object) -> tuple[str, ...]:
    """Return the decorators that may stand above a function in its source."""
    if not is_kernel_function(function):
        return ("staticmethod",)  # those of a torch.autograd.Function are
    return (_FALLBACK,) if "torch_function" in _held(function) else (_KERNEL,)


def _held(function: object) -> dict[str, object]:
    """Return what a module holds that `kernels` made of a function, and the wrapper that may call a package's.

    That wrapper is told by its code.
    """
    if not is_kernel_function(function):
        return {}
    held = cells(vars(type(function))["forward"])
    wrapped, decorator = held.get("func"), getattr(hub_kernels, _FALLBACK, None)  # not every release has it
    wrappers = [code for code in decorator.__code__.co_consts if isinstance(code, CodeType)] if decorator else []
    is_wrapper = isinstance(wrapped, FunctionType) and any(wrapped.__code__ in code.co_consts for code in wrappers)
    return held | cells(wrapped) if is_wrapper else held  # type: ignore[arg-type]
