"""Puts a forward of ours on a module, below what other libraries have put over its own, and takes it out again.

A wrapper calls what was there before it, and holds it in one of four ways. accelerate leaves

    module._old_forward = module.forward           # a method of the module: what is looked for
    module.forward = partial(new_forward, module)  # new_forward calls module._old_forward

so that the name of the attribute stands in the code of the wrapper; transformers' tensor parallelism, and most others,
leave a closure

    def wrapped(original):
        def forward(*args): return original(*args)
        return forward
    module.forward = wrapped(module.forward)

whose cell ``original`` holds the method: ``cell.cell_contents = other`` exchanges it; a default ``original=original``
behind ``*args`` does the same. The expert parallelism of transformers 5.23 has an object in the closure that is called
and that has the method as an attribute. `kernels` would replace the wrapper, and with it what that did: gradients that
nobody sums any more, or weights that nobody loads. A module whose wrapper holds its forward in any other way keeps what
it has, and is reported as wrapped.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from kernels_ext_npu.binding import registration, step_aside
from kernels_ext_npu.binding.loaded_kernels import (
    MATCHED,
    OWNER,
    forward_owner,
    kernel_name,
    kernel_package,
    layer_name,
)
from kernels_ext_npu.binding.patches import Patches
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.distribution import kernels_internals
from kernels_ext_npu.matching.fingerprint import class_methods, compared_methods
from kernels_ext_npu.matching.lookup import find_pattern

_EMPTY = CellType()
_NO_HOLDERS = (nn.Module, type, FunctionType, MethodType, functools.partial)  # whose attributes are not what they call


def own_forward(module: nn.Module) -> FunctionType | None:
    """Return the innermost forward of a module, below its wrappers: its class's or a kernel's; None if it is hidden."""
    functions = {function for function, _ in _slots(module)}
    (function,) = functions if len(functions) == 1 else (None,)
    return function if isinstance(function, FunctionType) else None


def put(module: nn.Module, function: Callable) -> bool:
    """Put a function in the place of a module's innermost forward, below its wrappers.

    Returns:
        Whether it could be put there; if not, nothing has changed.
    """
    slots = list(_slots(module))
    if len({held for held, _ in slots}) != 1:
        return False
    for _, place in slots:
        place(function)
    return True


def take_out(module: nn.Module) -> None:
    """Put back the forward without a kernel, wherever a module holds a kernel's or another one of ours."""
    below = _below_wrappers(module)
    for _, place in list(_slots(module)):
        place(below)


def wrapper(module: nn.Module) -> str | None:
    """Return the name of the wrapper that another library put over a module's forward; None if there is none."""
    forward = vars(module).get("forward")
    if forward is None or _is_own(forward, module):
        return None
    return str(getattr(forward, "__qualname__", None) or getattr(forward, "__name__", type(forward).__name__))


def refuse_wrapper(module: nn.Module) -> str | None:
    """Return why a kernel cannot go below the wrapper of a module's forward; None if it can, or there is none."""
    name = None if forward_owner(module) is not None else wrapper(module)
    if name is None or own_forward(module) is not None:
        return None
    reason = f"another library has wrapped its forward ({name}), and the wrapper must stay"
    return f"{reason}: it holds both the module's own forward and a kernel" if list(_slots(module)) else reason


def kernel_forward(module: nn.Module) -> FunctionType | None:
    """Return a module's innermost forward if it is that of a loaded kernel; None if it is another one."""
    function = own_forward(module) if "forward" in vars(module) else None
    return function if kernel_name(function) is not None else None


def foreign_forward(module: nn.Module) -> str | None:
    """Return the qualified name of a forward that another library installed on a module or its class; None of ours."""
    bound = vars(module).get("forward")
    forward = own_forward(module) or (bound.__func__ if isinstance(bound, MethodType) else type(module).forward)
    if not isinstance(forward, FunctionType) or hasattr(forward, OWNER) or kernel_name(forward) is not None:
        return None
    return foreign_name(forward, *(base.__module__ for base in type(module).__mro__))


def foreign_name(function: FunctionType, *modules: str) -> str | None:
    """Return the qualified name of a function that is from another library than all these modules; None if not."""
    libraries = {module.partition(".")[0] for module in modules}
    if function.__module__ is None or function.__module__.partition(".")[0] in libraries:
        return None
    return f"{function.__module__}.{function.__qualname__}"


def decorates_own(module: nn.Module) -> bool:
    """Tell whether ``__wrapped__`` of an instance's forward is that of its class, as under accelerate's autocast."""
    bound, own = vars(module).get("forward"), type(module).forward
    return bound is not None and inspect.unwrap(bound, stop=lambda function: function is own) is own


def our_forward(module: nn.Module) -> Any:
    """Return the forward of ours that computes a module, also below wrappers; None if none does."""
    bound = vars(module).get("forward")
    if bound is None:
        return None
    function = getattr(bound, "__func__", None)
    if not hasattr(function, OWNER):
        function = own_forward(module)
    return function if hasattr(function, OWNER) else None


def bound_layer(module: nn.Module) -> str | None:
    """Return the layer of ours that computes a module, also below wrappers; None if none does."""
    owner = getattr(our_forward(module), OWNER, None)
    return owner if owner in LAYERS else None


def bound_package(module: nn.Module) -> Any:
    """Return the package of the kernel of ours that computes a module; None if none does."""
    function = our_forward(module)
    return kernel_package(function) if getattr(function, OWNER, None) in LAYERS else None


def install(patches: Patches, serves: Callable[[nn.Module, str], bool]) -> None:
    """Let `kernels` put forwards below wrappers, too, and take the forward of its class out of what was unpickled.

    Args:
        serves: tells whether a layer of ours serves a module: a mark of its class may promise what that does not
            compute.
    """
    replace_forward = functools.partial(_replace_forward, serves)
    for module in kernels_internals.callers(kernels_internals.REPLACE):  # in which everything that swaps kernels ends
        patches.attribute(module, _replace_forward.__name__, replace_forward)
    patches.method(nn.Module, "__setstate__", _unpickle, registration.is_active)


def _replace_forward(serves: Callable[[nn.Module, str], bool], module: nn.Module, layer: type[nn.Module]) -> None:
    """Put the forward of a layer on a module, or that of its class, in place of what `kernels` calls for it."""
    bound, forward = getattr(vars(module).get("forward"), "__func__", None), layer.forward
    if getattr(bound, "__wrapped__", None) is forward and getattr(bound, MATCHED, None) is type(module).forward:
        return  # it is in place
    name = layer_name(forward)
    if layer is type(module):  # there is no kernel for the mark; if that is not ours, a layer of ours may stay
        if "forward" not in vars(module):
            return
        ours = None if getattr(layer, "kernel_layer_name", None) in LAYERS else bound_layer(module)
        if ours is None or not serves(module, ours):
            put(module, _below_wrappers(module))
    elif name is None:
        put(module, forward)
    elif serves(module, name):
        pattern = find_pattern(type(module))
        holds = None if pattern is None or pattern.guard is None else pattern.guard.holds
        names = compared_methods(type(module), type(module).forward)  # type: ignore[arg-type]
        methods = class_methods(type(module), names) if names else ()
        put(module, step_aside.guarded_forward(forward, _below_wrappers(module), holds, methods))  # type: ignore[arg-type]


def _unpickle(original: Callable, module: nn.Module, state: Any) -> None:
    """Take the forward of its class out of an unpickled module.

    A pickle knows a method by its name only: a kernel that was bound to a module comes back as what its class has under
    the name ``forward``, and bound to the module it would hide what the class is given later.
    """
    original(module, state)
    forward = vars(module).get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward:
        del module.forward


def _is_own(value: Any, module: nn.Module) -> bool:
    """Tell whether a value is the forward of a module's class, or of a kernel, bound to that very module."""
    if not isinstance(value, MethodType) or value.__self__ is not module:
        return False
    function = value.__func__
    return function is type(module).forward or hasattr(function, OWNER) or kernel_name(function) is not None


def _slots(module: nn.Module) -> Iterator[tuple[Callable, Callable[[Callable], None]]]:
    """Yield each innermost forward below a module's wrappers, with a function that replaces it there.

    Without a wrapper that is the module's own. A copy of a model shares the wrappers of the original, which call the
    original: nothing is found for the copy.
    """
    if "forward" not in vars(module) or _is_own(vars(module)["forward"], module):
        yield getattr(vars(module).get("forward"), "__func__", type(module).forward), functools.partial(_bind, module)
        return
    waiting, seen = [vars(module)["forward"]], set()
    for value in waiting:  # grows while it runs
        for child, place in _held_by(value, module):
            if _is_own(child, module):
                yield child.__func__, lambda function, place=place: place(MethodType(function, module))  # type: ignore
            elif callable(child) and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)


def _bind(module: nn.Module, function: Callable) -> None:
    if function is type(module).forward:
        vars(module).pop("forward", None)
    else:
        module.forward = MethodType(function, module)  # type: ignore[method-assign]


def _held_by(value: Any, module: nn.Module) -> Iterator[tuple[Any, Callable[[MethodType], None]]]:
    """Yield what a wrapper may call, each with a function that replaces it there."""
    function = value.func if isinstance(value, functools.partial) else getattr(value, "__func__", value)
    for cell in getattr(function, "__closure__", None) or ():
        if cell != _EMPTY:
            yield cell.cell_contents, functools.partial(setattr, cell, "cell_contents")
    defaults = getattr(function, "__kwdefaults__", None) or {}
    for name, default in defaults.items():
        yield default, functools.partial(defaults.__setitem__, name)
    if not isinstance(value, _NO_HOLDERS):
        for name, attribute in getattr(value, "__dict__", {}).items():
            yield attribute, functools.partial(setattr, value, name)
    read = {*getattr(getattr(function, "__code__", None), "co_names", ())} & vars(module).keys() - {"forward"}
    for name in read:
        yield vars(module)[name], functools.partial(setattr, module, name)


def _below_wrappers(module: nn.Module) -> Callable:
    """Return what a module's innermost forward is without a kernel.

    A wrapper holds what the class of the module had then, whatever it is given later.
    """
    own = None if wrapper(module) is None else own_forward(module)
    if own is None:
        return type(module).forward
    return getattr(own, MATCHED, type(module).forward if kernel_name(own) is not None else own)
