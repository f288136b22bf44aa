"""Swaps kernels into the functions that the classes of a model call: rotary ones, and those of linear attention.

`kernels` can replace the forward of a module only, so it makes a module of a function, one for the whole process, which
stands in the modeling file under the function's name. transformers has it do so for some functions; here it is done for
every function that a kernel serves, and nothing else can get a kernel for the NPU. What transformers lets an installed
package compute in the place of a function, such as flash-linear-attention, stays with that unless register() was told
otherwise. Since the module is one for the process, a swap and its end reach all models of the same architecture; on
other devices the kernels compute what the original does.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pickle import PicklingError
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kernels import use_kernel_forward_from_hub
from torch import nn

from kernels_ext_npu.binding import forward_binding, loaded_kernels, registration
from kernels_ext_npu.binding.devices import is_elsewhere
from kernels_ext_npu.binding.loaded_kernels import set_forward
from kernels_ext_npu.binding.registration import Registration
from kernels_ext_npu.catalogue import LAYERS, ROTARY
from kernels_ext_npu.distribution import kernels_internals
from kernels_ext_npu.matching import classification
from kernels_ext_npu.matching.function_scan import CalledFunction
from kernels_ext_npu.swaps import refusals
from kernels_ext_npu.swaps.decision import Decision, Finder, Swapping, View
from kernels_ext_npu.transformers_internals import is_kernel_function, original_function, package_function

if TYPE_CHECKING:
    from kernels_ext_npu.recognition.rotations.functions import Rotation

ROTATION = "rotation"  # owner, and attribute, of the forwards of functions that were found by running them
# functions of other people's code that are called rotary ones, and make what others rotate by
_MAKES_ANGLES = re.compile(
    r"(?!_?apply_)(_?(get|build|make|create|init|compute|precompute|pad)_|.*(freqs|cache|params|layout))"
)


def install(active: Registration) -> None:
    """Take the kernels out of all functions when kernels are no longer registered."""

    def take_out() -> None:
        for function in active.function_layers:
            forward_binding.take_out(function)

    active.patches.at_the_end(take_out)


def find(view: View) -> Iterator[Decision]:
    """Decide of every function that a kernel may serve and a module calls, once for each module."""
    for path, module, functions in view.calls:
        for callee in functions:
            layer, rotation = view.function_layers.get(callee), view.rotations.get(callee)
            makes_angles = not callee.file.startswith("transformers.") and _MAKES_ANGLES.match(callee.name)
            if layer is None and (makes_angles or module in view.recognised):  # a module that rotates has its own row
                continue
            reason = _refusal(module, callee, layer, rotation)
            # not where a package computes it, nor for unknown functions that do not rotate
            is_meant = callee.kind is ROTARY if layer is None else _is_ours(callee)
            yield Decision(
                path,
                module,
                layer,
                reason,
                layer if reason in (None, refusals.OTHER_SETTINGS) else None,
                None if rotation is None or rotation.left is None else refusals.left_calls(rotation.left),
                kind=callee.kind,
                is_candidate=is_meant and refusals.left_out(LAYERS[layer or ROTARY.layers[0]]) is None,
                function=callee.name,
                class_name=getattr(original_function(callee.function), "__qualname__", callee.name),
            )


def put(view: View, decisions: Iterable[Decision], swapping: Swapping) -> None:
    """Let `kernels` bind layers to the functions that a model calls on the NPU.

    Functions that other models call on the NPU are bound again, since kernelizing a model on another device unbinds
    them.
    """
    active = swapping.registration
    taken: dict[nn.Module, str] = {}
    for callee, layer in view.function_layers.items():
        if not (_is_ours(callee) and registration.uses(LAYERS[layer])):
            continue
        rotation = view.rotations.get(callee)
        if not all(map(is_elsewhere, view.callers[callee])):
            active.function_layers[_function_module(active, callee)] = layer
            if rotation is not None:
                _bind_rotation(callee.function, rotation)
        if rotation is None and callee.function in active.function_layers:
            taken[callee.function] = layer
    kernels_internals.bind_layers(taken, swapping.mode)


def revert(view: View) -> None:
    """Put the originals back, in all models that call the same functions."""
    for function in {callee.function for callee in view.callers}:
        if is_kernel_function(function):
            forward_binding.take_out(function)
        if registration.current is not None:
            registration.current.function_layers.pop(function, None)


def _refusal(module: nn.Module, callee: CalledFunction, layer: str | None, rotation: Rotation | None) -> str | None:
    """Return why a module that calls a function, known by a pattern or by running it, runs no kernel of ours."""
    forward = forward_binding.kernel_forward(callee.function) if is_kernel_function(callee.function) else None
    is_ours = loaded_kernels.layer_name(forward) is not None
    if forward is not None and not is_ours:
        return refusals.served_by(forward)
    if rotation is not None and is_kernel_function(callee.function):
        bound = _bound_rotation(callee.function)
        is_ours = bound is not None
        if bound not in (None, rotation):
            return refusals.OTHER_SETTINGS
    if layer is None:
        original = original_function(callee.function)
        if callee.kind is not ROTARY and original is not None:
            return classification.reason(callee.kind, f"{callee.file.rpartition('modeling_')[2]}:{callee.name}")
        foreign = forward_binding.foreign_name(original, callee.file) if original else None
        if foreign:
            return f"another library replaced it: {foreign}"
        return refusals.unknown_function(rotation.refused if rotation else None)
    if is_ours or is_elsewhere(module):
        return refusals.elsewhere(module)
    if (left_out := refusals.left_out(LAYERS[layer])) is not None:
        return left_out
    if not _is_ours(callee):
        package = package_function(callee.function)
        return f"computed by {getattr(package, '__module__', package)}: register(over_packages=True) takes the kernel"
    return refusals.NOT_REGISTERED if registration.current is None else refusals.NOT_ASKED_FOR_BY_ANY


def _bound_rotation(function: nn.Module) -> Rotation | None:
    """Return what the module of a function was bound as; None if no forward of a rotation is bound to it."""
    return getattr(vars(function).get("forward"), ROTATION, None)


def _bind_rotation(function: nn.Module, rotation: Rotation) -> None:
    """Bind the forward that rotates by the kernel to the module of a function that was found by running it."""
    from kernels_ext_npu.swaps.recognised.rotations import make_forward  # models of transformers do without

    if _bound_rotation(function) is not rotation:
        forward_binding.take_out(function)
        rotation.left = None
        forward = make_forward(rotation)
        setattr(forward, ROTATION, rotation)
        set_forward(function, forward, ROTATION)


def _is_ours(callee: CalledFunction) -> bool:
    """Tell whether the kernel may compute a function: no package does, or register(over_packages=True) was called."""
    if package_function(callee.function) is None:
        return True
    return registration.current is not None and registration.current.over_packages


def _function_module(active: Registration, callee: CalledFunction) -> nn.Module:
    """Return the module that `kernels` made of a function, or let it make one, and put that into the modeling file."""
    original: Any = original_function(callee.function)
    if not is_kernel_function(callee.function):
        if original not in active.functions:  # another file may have imported it
            active.functions[original] = use_kernel_forward_from_hub(callee.name)(original)
        active.patches.attribute(sys.modules[callee.file], callee.name, active.functions[original])
    active.functions[original] = callee.function
    cls: Any = type(callee.function)
    if "__reduce__" not in vars(cls):  # copies of a model get the module of the process, pickles refer to it by name
        # hooks of all modules and torch.fx see none in a function
        active.patches.attribute(cls, "__call__", lambda self, *args, **kwargs: self.forward(*args, **kwargs))
        active.patches.attribute(cls, "__deepcopy__", lambda self, memo: self)
        active.patches.attribute(cls, "__reduce__", lambda self: _by_name(original))
    return callee.function


def _by_name(original: FunctionType) -> tuple[Callable[[str], Any], tuple[str]]:
    """Reduce the module of a function to the name that it stands under; raise as `pickle` does if it was replaced."""
    place = f"{original.__module__}:{original.__name__}"
    if not is_kernel_function(pkgutil.resolve_name(place)):
        raise PicklingError(f"Can't pickle {place}: it was replaced in its file; put it back, or save a state dict")
    return pkgutil.resolve_name, (place,)


FINDER = Finder("functions", find, put, install, revert)
