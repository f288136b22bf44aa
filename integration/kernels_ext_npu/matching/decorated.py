"""What stands under the decorators of transformers, and under the modules that `kernels` makes of functions."""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType

import torch
from torch import nn
from transformers.integrations import hub_kernels
from transformers.modeling_rope_utils import dynamic_rope_update

_KERNEL, _FALLBACK = "use_kernel_forward_from_hub", "use_kernel_func_from_hub_with_fallback"


def undecorated(function: FunctionType) -> tuple[FunctionType, tuple[str, ...]]:
    """Return the function under torch.no_grad, and under dynamic_rope_update below that, and the names of these.

    Anything else comes back as it is. torch's wrapper is told by its code, and by what it enters: that of enable_grad
    has the same code.
    """
    if function.__code__ is not torch.no_grad()(_nothing).__code__:
        return function, ()
    cells = _cells(function)
    inner = cells.get("func")
    if type(getattr(cells.get("ctx_factory"), "__self__", None)) is not torch.no_grad:
        return function, ()
    if not isinstance(inner, FunctionType):
        return function, ()
    if inner.__code__ is not dynamic_rope_update(_nothing).__code__:
        return inner, ("torch.no_grad",)
    innermost = _cells(inner).get("rope_forward")
    if not isinstance(innermost, FunctionType):
        return function, ()
    return innermost, ("torch.no_grad", "dynamic_rope_update")


def is_kernel_function(function: object) -> bool:
    """Tell whether an object is a module that `kernels` made of a function."""
    return isinstance(function, nn.Module) and type(function).__qualname__ == "_create_func_module.<locals>.Func"


def original_function(function: object) -> FunctionType | None:
    """Return the function itself, also where `kernels` made a module of it; None for what is neither."""
    if isinstance(function, FunctionType):
        return function
    if not is_kernel_function(function):
        return None
    original = _wrapped(function)
    if original is not None and _is_fallback(original):
        original = _cells(original)["torch_function"]  # type: ignore[assignment]
    return original if isinstance(original, FunctionType) else None


def package_function(function: object) -> Callable | None:
    """Return what transformers calls of an installed package in place of a function; None where it calls its own."""
    wrapped = _wrapped(function) if is_kernel_function(function) else None
    if wrapped is None or not _is_fallback(wrapped):
        return None
    cells = _cells(wrapped)
    return cells["implementation"] if cells["is_new_implementation"] else None  # type: ignore[return-value]


def decorators_of(function: object) -> tuple[str, ...]:
    """Return the decorators that may stand above a function in its source."""
    if not is_kernel_function(function):
        return ("staticmethod",)  # those of a torch.autograd.Function are
    wrapped = _wrapped(function)
    return (_FALLBACK if wrapped is not None and _is_fallback(wrapped) else _KERNEL,)


def _wrapped(function: object) -> FunctionType | None:
    """Return what the module calls that `kernels` made of a function."""
    wrapped = _cells(vars(type(function))["forward"]).get("func")
    return wrapped if isinstance(wrapped, FunctionType) else None


def _is_fallback(function: FunctionType) -> bool:
    """Tell by its code whether a function is the wrapper that calls a package's function or the one of transformers."""
    decorator = getattr(hub_kernels, _FALLBACK, None)  # not every release has it
    inner = decorator.__code__.co_consts if decorator is not None else ()
    return any(function.__code__ in code.co_consts for code in inner if isinstance(code, CodeType))


def _cells(function: FunctionType) -> dict[str, object]:
    return {n: cell.cell_contents for n, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}


def _nothing() -> None:
    """Do nothing: the decorators show their code on what they decorate, and that is this."""
