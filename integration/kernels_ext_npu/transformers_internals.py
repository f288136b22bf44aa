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
from types import FunctionType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.utils.deprecation import deprecate_kwarg

NO_GRAD = "torch.no_grad"
RENAMES = "deprecate_kwarg"  # takes a parameter by its old name, too
_LAYERS = "transformers.modeling_layers"


def _nothing() -> None:
    """Do nothing: the decorators show their code on what they decorate, and that is this."""


# the code of a decorator's wrapper -> the name of the decorator, and of what holds the function in its closure
_WRAPPERS = {
    torch.no_grad()(_nothing).__code__: (NO_GRAD, "func"),
    deprecate_kwarg("old", "0", new_name="new")(_nothing).__code__: (RENAMES, "func"),
    dynamic_rope_update(_nothing).__code__: ("dynamic_rope_update", "rope_forward"),
}


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
        result, _ = sdpa_attention_forward(torch.nn.Module(), keys[:, :, :1], keys, values, bias)
        return result.item() > 0.5


def undecorated(function: FunctionType) -> tuple[FunctionType, tuple[str, ...]]:
    """Return the function under decorators that are seen through, and their names, the outermost first.

    Those of others, and what only looks like one of these, stay above it.
    """
    names: list[str] = []
    while (found := _decorator(function)) is not None:
        name, function = found
        names.append(name)
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
    return {n: cell.cell_contents for n, cell in zip(function.__code__.co_freevars, function.__closure__ or ())}


def _decorator(function: FunctionType) -> tuple[str, FunctionType] | None:
    """Return the name of the outermost decorator, which is told by its code, and what is below it."""
    name, inside = _WRAPPERS.get(function.__code__, ("", ""))
    held = cells(function)
    if name == NO_GRAD and type(getattr(held.get("ctx_factory"), "__self__", None)) is not torch.no_grad:
        return None  # enable_grad's wrapper has the same code, and enters something else
    inner = held.get(inside)
    return (name, inner) if isinstance(inner, FunctionType) else None
