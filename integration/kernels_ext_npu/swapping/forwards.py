"""Finds the forward of a module below what other libraries have put over it, and exchanges it there.

Tensor parallelism, accelerate, adapters and users replace ``module.forward`` by something that calls what was there
before. `kernels` replaces whatever it finds, and with it what the wrapper did: gradients that nobody sums any more, or
weights that nobody loads. Here the kernel goes to the place inside the wrapper that holds the module's own forward.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple

from torch import nn

Put = Callable[[Any], None]
_Slot = tuple[Any, Put, bool]
_EMPTY = CellType()


class _Place(NamedTuple):
    """Somewhere that a forward of a module is held, and how another one gets there."""

    held: MethodType
    put: Put


def own_forward(module: nn.Module) -> FunctionType | None:
    """The function that computes in the end when a module is called; None where wrappers do not show it.

    It is the forward of its class, or that of a kernel.
    """
    if "forward" not in vars(module):
        forward = type(module).forward
        return forward if isinstance(forward, FunctionType) else None
    functions = {place.held.__func__ for place in _places(module)}
    (function,) = functions if len(functions) == 1 else (None,)
    return function  # type: ignore[return-value]


def put(module: nn.Module, function: Callable) -> bool:
    """Let a function compute what the forward of a module computed, below all that was put over it.

    Returns:
        Whether it could be put there; if not, nothing has changed.
    """
    forward = vars(module).get("forward")
    if forward is None or _is_own(forward, module):
        if function is type(module).forward:
            vars(module).pop("forward", None)
        else:
            module.forward = MethodType(function, module)  # type: ignore[method-assign]
        return True
    if own_forward(module) is None:
        return False
    _exchange(module, function)
    return True


def take_out(module: nn.Module) -> None:
    """Put the forward of its class wherever a module holds that of a kernel."""
    if kernel_forward(module) is not None:
        put(module, type(module).forward)
    elif "forward" in vars(module) and any(kernel_name(place.held.__func__) for place in _places(module)):
        _exchange(module, type(module).forward)


def wrapper(module: nn.Module) -> str | None:
    """The name of what was put over a module's forward by somebody other than `kernels`."""
    forward = vars(module).get("forward")
    if forward is None or _is_own(forward, module):
        return None
    return str(getattr(forward, "__qualname__", None) or getattr(forward, "__name__", type(forward).__name__))


def refusal(module: nn.Module) -> str | None:
    """Why a kernel cannot go below what was put over a module's forward; None if it can, or nothing was."""
    name = wrapper(module)
    if name is None or own_forward(module) is not None:
        return None
    reason = f"another library has wrapped its forward ({name}), and the wrapper must stay"
    return f"{reason}: it holds both the module's own forward and a kernel" if _places(module) else reason


def kernel_forward(module: nn.Module) -> FunctionType | None:
    """The function of a loaded kernel that a module's forward is, or would be without what others put over it."""
    function = own_forward(module) if "forward" in vars(module) else None
    return function if kernel_name(function) is not None else None


def kernel_name(forward: Callable | None) -> str | None:
    """The name of the kernel that a forward function was loaded from by `kernels`."""
    from kernels import get_loaded_kernels

    if not isinstance(forward, FunctionType):
        return None
    package = forward.__module__.partition(".")[0]
    return next((str(k.metadata.name) for k in get_loaded_kernels() if k.metadata.id == package), None)


def install() -> None:
    """Let `kernels` put forwards below wrappers, too. Once a process: models outlive unregister().

    Everything that swaps kernels ends in this function: ``use_kernels=True``, ``train()`` and ``eval()``, and whoever
    calls `kernels` directly.
    """
    from kernels.layer import layer

    if hasattr(layer._replace_forward, "kernels_ext_npu"):
        return
    original = layer._replace_forward

    @functools.wraps(original)
    def _replace_forward(module: nn.Module, layer: type[nn.Module]) -> None:
        if wrapper(module) is None:
            original(module, layer)
        else:
            put(module, layer.forward)

    _replace_forward.kernels_ext_npu = original  # type: ignore[attr-defined]
    layer._replace_forward = _replace_forward


def _exchange(module: nn.Module, function: Callable) -> None:
    method = MethodType(function, module)
    for place in list(_places(module)):
        place.put(method)


def _is_own(value: Any, module: nn.Module) -> bool:
    """Whether it is the forward of a module's class, or of a kernel, bound to that very module."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    return value.__func__ is type(module).forward or kernel_name(value.__func__) is not None


def _places(module: nn.Module) -> list[_Place]:
    """Where a module's forward is held by what is called when the module is.

    A copy of a model shares the wrappers of the original, which call the original: nothing is found for the copy.
    """
    forward = vars(module)["forward"]
    if _is_own(forward, module):
        return [_Place(forward, functools.partial(setattr, module, "forward"))]
    found: list[_Place] = []
    notes: list[_Place] = []
    waiting, seen, names = [forward], {id(forward)}, set()
    for value in waiting:  # grows while it runs
        names |= _names(value)
        slots = list(_held_by(value))
        if value is waiting[-1] and id(module) in seen:  # what the wrappers take from the module, by its name
            slots += [slot for name, slot in _attributes(module) if name in names]
        for child, place, is_called in slots:
            if _is_own(child, module):
                (found if is_called else notes).append(_Place(child, place))
            elif is_called and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    held = {id(place.held) for place in found}
    return found + [place for place in notes if id(place.held) in held]


def _held_by(value: Any) -> Iterator[_Slot]:
    """What a wrapper can call, how something else gets there, and whether it is called: a note of it is not."""
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
    """What a function may read of a module, in its code or as a text for getattr."""
    if not isinstance(value, FunctionType):
        return set()
    code = value.__code__
    return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}


def _call_of(value: Any) -> FunctionType | None:
    """What runs when an object of a class in Python is called. Modules have forwards of their own."""
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
    """A partial has no setters, but takes another state, as copies of it do."""
    function, args, keywords = partial.func, list(partial.args), dict(partial.keywords)
    if key is None:
        function = value
    elif isinstance(key, int):
        args[key] = value
    else:
        keywords[key] = value
    partial.__setstate__((function, tuple(args), keywords, vars(partial)))  # type: ignore[attr-defined]


def _nowhere(value: Any) -> None:
    """The parts of a method are not exchanged: the method is, by what holds it."""
