"""What differs between the releases of transformers that are supported: here alone, and told by what it is.

A cache goes by ``past_key_values`` or ``cache_params`` up to transformers 5.23, and by ``cache`` from 5.24 on: it is
found as an instance of `Cache`, or as a parameter that is annotated as one. Rotary tables are under ``torch.no_grad``
up to 5.23, and decoder layers, attention and indexers under ``deprecate_kwarg`` from 5.24 on: decorators are seen
through in any order.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.cache_utils import Cache
from transformers.integrations import hub_kernels
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.utils.deprecation import deprecate_kwarg

NO_GRAD = "torch.no_grad"
RENAMES = "deprecate_kwarg"  # takes a parameter by its old name, too
_LAYERS = "transformers.modeling_layers"
_KERNEL, _FALLBACK = "use_kernel_forward_from_hub", "use_kernel_func_from_hub_with_fallback"


def _nothing() -> None:
    """Do nothing: the decorators show their code on what they decorate, and that is this."""


# the code of a decorator's wrapper -> the name of the decorator, and of what holds the function in its closure
_WRAPPERS = {
    torch.no_grad()(_nothing).__code__: (NO_GRAD, "func"),
    deprecate_kwarg("old", "0", new_name="new")(_nothing).__code__: (RENAMES, "func"),
    dynamic_rope_update(_nothing).__code__: ("dynamic_rope_update", "rope_forward"),
}
# the code of a wrapper that may call a package's function, inside its decorator's, which not every release has
_DECORATING = getattr(hub_kernels, _FALLBACK, _nothing).__code__.co_consts
_FALLBACKS = {wrapper for code in _DECORATING if isinstance(code, CodeType) for wrapper in code.co_consts}


def cache_in(named: Mapping[str, Any]) -> tuple[str, Cache] | None:
    """Return the cache among arguments or in an output, and its name there; None where there is none."""
    return next(((name, value) for name, value in named.items() if isinstance(value, Cache)), None)


@functools.cache
def cache_parameter(function: Callable) -> str:
    """Return the name by which a function takes a cache: as transformers' masks do, where it names none itself."""
    from transformers.masking_utils import create_causal_mask  # register() need not wait for it

    for each in (function, create_causal_mask):
        for name, parameter in inspect.signature(each).parameters.items():
            if re.search(r"Cache\b", str(parameter.annotation)):
                return name
    raise LookupError("transformers' create_causal_mask takes no cache any more")


@functools.cache
def sdpa_drops_biases() -> bool:
    """Tell whether transformers' ``sdpa`` reads a bias in a mask as a mask, as up to 5.24.0 with torch_npu.

    Of two keys with the values 0 and 1 and a bias of 3 for the first, it hides the first or gives it 95%.
    """
    with _disable_current_modes(), torch.device("cpu"), torch.no_grad():  # fake tensors would have no values
        keys = torch.zeros(1, 1, 2, 1)
        bias, values = torch.tensor([[[[3.0, 0.0]]]]), torch.tensor([[[[0.0], [1.0]]]])
        result, _ = sdpa_attention_forward(nn.Module(), keys[:, :, :1], keys, values, bias)
        return result.item() > 0.5


def is_kernel_function(function: object) -> bool:
    """Tell whether an object is a module that `kernels` made of a function."""
    return isinstance(function, nn.Module) and type(function).__qualname__ == "_create_func_module.<locals>.Func"


def original_function(function: object) -> FunctionType | None:
    """Return the function itself, also below what `kernels` or torch made of it; None for what is neither."""
    if isinstance(function, torch.jit.ScriptFunction):
        function = getattr(function, "_torchdynamo_inline", None)  # what was compiled
    if isinstance(function, FunctionType):
        original = getattr(function, "_torchdynamo_orig_callable", function)  # by torch.compile
        return original if isinstance(original, FunctionType) else None
    if not isinstance(function, nn.Module):
        return None
    held = _held(function)
    original = held.get("torch_function", held.get("func"))
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


def undecorated(function: FunctionType) -> tuple[FunctionType, tuple[str, ...]]:
    """Return the function under decorators that are seen through, and their names, the outermost first.

    Those of others, and what only looks like one of these, stay above it.
    """
    names: list[str] = []
    while function.__code__ in _WRAPPERS:
        name, inside = _WRAPPERS[function.__code__]
        held = cells(function)
        if name == NO_GRAD and type(getattr(held["ctx_factory"], "__self__", None)) is not torch.no_grad:
            break  # enable_grad's wrapper has the same code, and enters something else
        if not isinstance(inner := held[inside], FunctionType):
            break
        names.append(name)
        function = inner
    return function, tuple(names)


def below_wrappers(forward: object) -> FunctionType | None:
    """Return the forward of a layer as it is in its file; None under what is not seen through, or if it is no function.

    Beside decorators that is what checkpoints layers from 5.23 on, which has to stay above a forward in its place.
    """
    while isinstance(forward, FunctionType):
        inner = undecorated(forward)[0]
        if forward.__globals__.get("__name__") == _LAYERS:
            inner = getattr(forward, "__wrapped__", inner)
        if inner is forward:
            break
        forward = inner
    return forward if isinstance(forward, FunctionType) and not hasattr(forward, "__wrapped__") else None


def are_seen_through(decorators: Sequence[ast.expr], names: Mapping[str, Any]) -> bool:
    """Tell whether decorators in the source of a forward only switch gradients off, or take old names of parameters.

    Args:
        decorators: as a syntax tree has them.
        names: the globals of the forward.
    """
    known = {NO_GRAD: ("torch", torch), RENAMES: (RENAMES, deprecate_kwarg)}
    written = [known.get(ast.unparse(decorator).partition("(")[0]) for decorator in decorators]
    return all(found is not None and names.get(found[0]) is found[1] for found in written)


def cells(function: FunctionType) -> dict[str, object]:
    """Return what a function has in its closure, by name."""
    return dict(zip(function.__code__.co_freevars, map(attrgetter("cell_contents"), function.__closure__ or ())))


def _held(function: object) -> dict[str, object]:
    """Return what a module holds that `kernels` made of a function, and the wrapper that may call a package's."""
    if not is_kernel_function(function):
        return {}
    held = cells(vars(type(function))["forward"])
    wrapped = held.get("func")
    return held | cells(wrapped) if getattr(wrapped, "__code__", None) in _FALLBACKS else held  # type: ignore[arg-type]
