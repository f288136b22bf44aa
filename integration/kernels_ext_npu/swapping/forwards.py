"""Finds the forward of a module below what other libraries have put over it, and exchanges it there.

Tensor parallelism, accelerate, adapters and users replace ``module.forward`` by something that calls what was there
before. `kernels` replaces whatever it finds, and with it what the wrapper did: gradients that nobody sums any more, or
weights that nobody loads. Here the kernel goes to the place inside the wrapper that holds the module's own forward.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from kernels_ext_npu.swapping.holders import is_own, places
from kernels_ext_npu.swapping.loaded import kernel_name, layer_name
from kernels_ext_npu.swapping.patches import Patches

# what computed when a module was called before it got a kernel: a wrapper holds that, whatever its class is given later
_before: weakref.WeakKeyDictionary[nn.Module, FunctionType] = weakref.WeakKeyDictionary()


def own_forward(module: nn.Module) -> FunctionType | None:
    """Return the function that computes in the end when a module is called; None where wrappers do not show it.

    It is the forward of its class, or that of a kernel.
    """
    if "forward" not in vars(module):
        forward = type(module).forward
        return forward if isinstance(forward, FunctionType) else None
    functions = {place.held.__func__ for place in places(module)}
    (function,) = functions if len(functions) == 1 else (None,)
    return function  # type: ignore[return-value]


def put(module: nn.Module, function: Callable) -> bool:
    """Let a function compute what the forward of a module computed, below all that was put over it.

    Returns:
        Whether it could be put there; if not, nothing has changed.
    """
    forward = vars(module).get("forward")
    if forward is None or is_own(forward, module):
        if function is type(module).forward:
            vars(module).pop("forward", None)
        else:
            module.forward = MethodType(function, module)  # type: ignore[method-assign]
        return True
    if own_forward(module) is None:
        return False
    _exchange(module, _wrapped(module) if function is type(module).forward else function)
    return True


def take_out(module: nn.Module) -> None:
    """Put the forward of its class wherever a module holds that of a kernel.

    `kernels` also binds the forward of the class itself, where it has no kernel: the module is left without that too.
    """
    forward = vars(module).get("forward")
    if forward is None:
        return
    if is_own(forward, module):
        del module.forward
    elif any(kernel_name(place.held.__func__) for place in places(module)):
        _exchange(module, _wrapped(module))


def wrapper(module: nn.Module) -> str | None:
    """Return the name of what was put over a module's forward by somebody other than `kernels`.

    It is None where nothing was.
    """
    forward = vars(module).get("forward")
    if forward is None or is_own(forward, module):
        return None
    return str(getattr(forward, "__qualname__", None) or getattr(forward, "__name__", type(forward).__name__))


def refuse_wrapper(module: nn.Module) -> str | None:
    """Return why a kernel cannot go below what was put over a module's forward; None if it can, or nothing was."""
    name = wrapper(module)
    if name is None or own_forward(module) is not None:
        return None
    reason = f"another library has wrapped its forward ({name}), and the wrapper must stay"
    return f"{reason}: it holds both the module's own forward and a kernel" if places(module) else reason


def kernel_forward(module: nn.Module) -> FunctionType | None:
    """Return the function of a loaded kernel that a module's forward is, or would be without wrappers.

    It is None where the forward is another one.
    """
    function = own_forward(module) if "forward" in vars(module) else None
    return function if kernel_name(function) is not None else None


def install(patches: Patches) -> None:
    """Let `kernels` put forwards below wrappers, too, and let pickles of swapped modules leave no forward behind."""
    _install_replacing(patches)
    _install_unpickling(patches)


def _install_replacing(patches: Patches) -> None:
    """Change what everything that swaps kernels ends in.

    That is ``use_kernels=True``, ``train()`` and ``eval()``, and whoever calls `kernels` directly.
    """
    from kernels.layer import layer

    original: Any = layer._replace_forward

    @functools.wraps(original)
    def _replace_forward(module: nn.Module, layer: type[nn.Module]) -> None:
        from kernels_ext_npu.swapping import aside  # what reads forwards is not imported by register()

        own = own_forward(module)
        if own is not None and kernel_name(own) is None:
            _before[module] = own
        if wrapper(module) is not None:
            put(module, layer.forward)
        elif layer_name(layer.forward) is not None:
            put(module, aside.stepping(layer.forward, type(module).forward))  # type: ignore[arg-type]
        else:
            original(module, layer)
            _leave_to_class(module)

    patches.attribute(layer, "_replace_forward", _replace_forward)


def _install_unpickling(patches: Patches) -> None:
    """Take the forward of its class out of a module that was just unpickled.

    A pickle knows a method by its name only: the kernel that was bound to a module comes back as what its class has
    under the name ``forward``, and bound to the module it would hide what the class is given later.
    """
    original: Any = nn.Module.__setstate__

    @functools.wraps(original)
    def __setstate__(self: nn.Module, state: Any) -> None:  # noqa: N807
        original(self, state)
        _leave_to_class(self)

    patches.attribute(nn.Module, "__setstate__", __setstate__)


def _leave_to_class(module: nn.Module) -> None:
    """Take the forward of its class out of a module, where it would hide what the class is given later.

    `kernels` binds it where it has no kernel.
    """
    forward = vars(module).get("forward")
    if isinstance(forward, MethodType) and forward.__self__ is module and forward.__func__ is type(module).forward:
        del module.forward


def _wrapped(module: nn.Module) -> Callable:
    """Return what the wrappers of a module's forward would hold without a kernel."""
    return _before.get(module, type(module).forward)


def _exchange(module: nn.Module, function: Callable) -> None:
    method = MethodType(function, module)
    for place in list(places(module)):
        place.put(method)
