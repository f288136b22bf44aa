"""Where the forward of a module is held by what other libraries have put over it.

A wrapper holds what it calls in a cell of its closure, a default, a partial, a list, a dictionary or an attribute, and
each of them can be written. accelerate, for example, leaves

    module._old_forward = module.forward          # a method of the module: what is looked for
    module.forward = partial(new_forward, module) # new_forward calls module._old_forward

so that the search starts at ``module.forward``, opens the partial and finds the function `new_forward`, whose code
names the attribute `_old_forward`: there the method is exchanged. Of

    def counted(original):
        def forward(*args): return original(*args)
        return forward
    module.forward = counted(module.forward)

the method lies in the cell `original` of the closure, and ``cell.cell_contents = other`` exchanges it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

from kernels_ext_npu.swapping.loaded import kernel_name

Put = Callable[[Any], None]
_Slot = tuple[Any, Put, bool]
_EMPTY = CellType()


class Place(NamedTuple):
    """A place that holds a forward of a module, and what puts another one there."""

    held: MethodType
    put: Put


def places(module: nn.Module) -> list[Place]:
    """Return where a module's forward is held by what is called when the module is.

    A copy of a model shares the wrappers of the original, which call the original: nothing is found for the copy.
    """
    forward = vars(module)["forward"]
    if is_own(forward, module):
        return [Place(forward, functools.partial(setattr, module, "forward"))]
    found: list[Place] = []
    notes: list[Place] = []
    waiting, seen, names = [forward], {id(forward)}, set()
    for value in waiting:  # grows while it runs
        names |= _names(value)
        slots = list(_held_by(value))
        if value is waiting[-1] and id(module) in seen:  # what the wrappers take from the module, by its name
            slots += [slot for name, slot in _attributes(module) if name in names]
        for child, place, is_called in slots:
            if is_own(child, module):
                (found if is_called else notes).append(Place(child, place))
            elif is_called and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    held = {id(place.held) for place in found}
    return found + [place for place in notes if id(place.held) in held]


def is_own(value: Any, module: nn.Module) -> bool:
    """Tell whether a value is the forward of a module's class, or of a kernel, bound to that very module."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    return value.__func__ is type(module).forward or kernel_name(value.__func__) is not None


def _held_by(value: Any) -> Iterator[_Slot]:
    """Give what a wrapper can call, how something else gets there, and whether it is called: a note of it is not."""
    if isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != _EMPTY]
        yield from ((cell.cell_contents, functools.partial(setattr, cell, "cell_contents"), True) for cell in cells)
        for index, default in enumerate(value.__defaults__ or ()):
            yield default, functools.partial(_set_default, value, index), True
        yield from _entries(value.__kwdefaults__ or {})
        yield from _entries(vars(value), is_called=False)
    elif isinstance(value, functools.partial):
        yield value.func, functools.partial(_set_of_partial, value, None), True
        for index, argument in enumerate(value.args):
            yield argument, functools.partial(_set_of_partial, value, index), True
        for keyword, argument in value.keywords.items():
            yield argument, functools.partial(_set_of_partial, value, keyword), True
        yield from _entries(vars(value), is_called=False)
    elif isinstance(value, MethodType):
        yield value.__func__, _nowhere, True
        yield value.__self__, _nowhere, True
    elif isinstance(value, list):
        yield from ((child, functools.partial(value.__setitem__, index), True) for index, child in enumerate(value))
    elif type(value) is dict:
        yield from _entries(value)
    elif (call := _call_of(value)) is not None:
        yield call, _nowhere, True
        yield from _entries(getattr(value, "__dict__", {}))


def _attributes(module: nn.Module) -> list[tuple[str, _Slot]]:
    members = {name: value for name, value in vars(module).items() if name != "forward" and callable(value)}
    return [(name, (value, functools.partial(vars(module).__setitem__, name), True)) for name, value in members.items()]


def _names(value: Any) -> set[str]:
    """Return what a function may read of a module, in its code or as a text for getattr."""
    if not isinstance(value, FunctionType):
        return set()
    code = value.__code__
    return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}


def _call_of(value: Any) -> FunctionType | None:
    """Return what runs when an object of a class in Python is called. Modules have forwards of their own."""
    call = inspect.getattr_static(type(value), "__call__", None)
    return call if isinstance(call, FunctionType) and not isinstance(value, (nn.Module, type)) else None


def _entries(values: dict, is_called: bool = True) -> Iterator[_Slot]:
    for key, child in list(values.items()):
        yield child, functools.partial(values.__setitem__, key), is_called


def _set_default(function: FunctionType, index: int, value: Any) -> None:
    defaults = list(function.__defaults__ or ())
    defaults[index] = value
    function.__defaults__ = tuple(defaults)


def _set_of_partial(partial: functools.partial, key: int | str | None, value: Any) -> None:
    """Exchange a part of a partial, which has no setters, but takes another state, as copies of it do."""
    function, args, keywords = partial.func, list(partial.args), dict(partial.keywords)
    if key is None:
        function = value
    elif isinstance(key, int):
        args[key] = value
    else:
        keywords[key] = value
    partial.__setstate__((function, tuple(args), keywords, vars(partial)))  # type: ignore[attr-defined]


def _nowhere(value: Any) -> None:
    """Leave a part of a method as it is: what holds the method exchanges the whole of it."""
