"""What the forward of a module may read of it beside tensors: as long as that stays, it computes the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

_SETTINGS = (bool, int, float, str, type(None), torch.dtype, torch.Size)
_OWN_TO_TORCH = {*vars(nn.Module()), "training"}


class Settings(NamedTuple):
    """What a forward may read of a module, but for its weights and its projections."""

    cls: type[nn.Module]
    forward: Any  # that of the class
    members: tuple[tuple[str, Any], ...]  # numbers, strings and the like, of the module or of its class
    absent: frozenset[str]  # what its code may look for, and the module does not have
    children: tuple[tuple[str, Settings], ...] = ()


def read_settings(module: nn.Module) -> Settings | None:
    """Return what a forward may read; None if there is more, such as tensors, objects, or modules inside of modules."""
    cls, own = type(module), vars(module)
    names = names_read(cls, cls.forward)  # type: ignore[arg-type]
    members = {name: own[name] for name in names if name in own and name not in _OWN_TO_TORCH}
    on_class = {name: inspect.getattr_static(cls, name, None) for name in names.difference(own)}
    members |= {name: value for name, value in on_class.items() if value is not None and isinstance(value, _SETTINGS)}
    if module._buffers or not all(map(_is_setting, members.values())):
        return None
    others = {name: child for name, child in module._modules.items() if child is not None and not is_projection(child)}
    children = {name: None if any(child.children()) else read_settings(child) for name, child in others.items()}
    if None in children.values():
        return None
    absent = names.difference(own, members)
    return Settings(cls, cls.forward, (*members.items(),), absent, (*children.items(),))  # type: ignore[arg-type]


def _is_setting(value: Any) -> bool:
    """Tell whether a value is one that does not change by itself: a number, a string, or a function of torch."""
    is_function = isinstance(value, (FunctionType, BuiltinFunctionType))
    return isinstance(value, _SETTINGS) or (is_function and str(value.__module__).startswith("torch."))


@functools.cache
def names_read(cls: type[nn.Module], _: Any) -> frozenset[str]:
    """Return the names in the methods of a class with this forward, and in strings that may be names."""
    bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
    codes = [code for base in bases for code in codes_in(base)]
    strings = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
    names = {name for code in codes for name in code.co_names} | set(filter(str.isidentifier, strings))
    return frozenset(names - {"forward"})  # under which ours is bound


def is_projection(child: Any) -> bool:
    """Tell whether a child multiplies with a weight, whatever its class does beside that: it is called as it is."""
    return hasattr(child, "in_features") and hasattr(child, "out_features")


def codes_in(cls: type) -> Iterator[CodeType]:
    """Yield the code of the methods of a class itself, and of the functions in them."""
    codes = [value.__code__ for value in vars(cls).values() if isinstance(value, FunctionType)]
    for code in codes:  # grows while it runs
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield code
