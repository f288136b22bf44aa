"""Swaps kernels into the rotary functions that the classes of a model call.

`kernels` can replace the forward of a module only, so it makes a module of a function, one for the whole process, which
stands in the modeling file under the function's name. transformers has it do so for some functions and shows them to
`kernels.kernelize` through `_kernel_funcs` of the modules that call them. Here both is done for every function that a
kernel serves, and nothing else can get a kernel for the NPU. Since the module is one for the process, a swap and its
end reach all models of the same architecture; on other devices the kernels compute what the original does.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.matching.lookup import find_function_reference, is_kernel_function, original_function
from kernels_ext_npu.swapping.classes import ABSENT, device_of, foreign
from kernels_ext_npu.swapping.forwards import kernel_name

if TYPE_CHECKING:
    from kernels_ext_npu.reporting.report import Row

SHARED = (
    "A rotary function is one object for the process: other models of the same architecture run the same kernels, and "
    "lose them with restore()."
)
_ROTATES = re.compile(r"^(\w+_|_)?(apply|rotate)_\w*(rotary|rope|half|every_two|pairwise|queries)\w*$")
_NOT_MODELS = re.compile(r"(torch|torch_npu|kernels|transformers(?!\.models))(\.|$)")

_undo: list[Callable[[], Any]] = []
_wrapped: dict[FunctionType, nn.Module] = {}
_kept: dict[Any, Callable] = {}
_uses: dict[type, tuple[Use, ...]] = {}


class Use(NamedTuple):
    """A function as a modeling file knows it."""

    file: str
    name: str


def prepare(model: nn.Module, mapping: dict[str, dict]) -> None:
    """Mark the functions that a kernel serves, unmark the others, and show them to `kernels.kernelize`.

    Args:
        model: a model that is about to be kernelized.
        mapping: transformers' own table, with the entries of our layers.
    """
    _kept.clear()
    elsewhere = device_of(model) not in ("npu", None)
    for module in model.modules():
        for use in uses(type(module)):
            reference = find_function_reference(_function(use))
            if reference is None:
                if is_kernel_function(_function(use)):
                    _refuse(_function(use), mapping)
                continue
            if not is_kernel_function(_function(use)):
                _wrap(use, reference.layer)
            _mark(_function(use), reference.layer, mapping)
            _attach(module, use.name, _function(use))
            if elsewhere and kernel_name(_swapped(_function(use))) is not None:
                _kept[_function(use)] = _function(use).forward


def finish() -> None:
    """After a model on another device was kernelized: give the kernels back to the models on the NPU that it took."""
    for function, forward in _kept.items():
        function.forward = forward
    _kept.clear()


def restore(model: nn.Module) -> None:
    """Put the originals back, in all models that call the same functions."""
    for function in {_function(use) for module in model.modules() for use in uses(type(module))}:
        if is_kernel_function(function):
            _unswap(function)


def remove() -> None:
    """Leave the modeling files as they were, and with them every model."""
    while _undo:
        _undo.pop()()
    _wrapped.clear()


def rows(model: nn.Module) -> Iterator[Row]:
    """A row for each function that each module of a model calls."""
    from kernels_ext_npu.api import register
    from kernels_ext_npu.reporting.report import KINDS, Row

    candidate = register.left_out("RoPE") is None
    for path, module in model.named_modules():
        for use in uses(type(module)):
            reference, reason = find_function_reference(_function(use)), refusal(module, use)
            name = getattr(original_function(_function(use)), "__qualname__", use.name)
            layer = reference.layer if reference else None
            yield Row(f"{path}.{use.name}".lstrip("."), name, layer, reason is None, reason, candidate, KINDS["RoPE"])


def refusal(module: nn.Module, use: Use) -> str | None:
    """Why a module that calls a function does not run a kernel of ours; None if it does."""
    from kernels_ext_npu.api import register

    forward = _swapped(_function(use))
    kernel, layer = kernel_name(forward), getattr(forward, "__qualname__", "").partition(".")[0]
    if kernel is not None and (kernel != "rope" or layer not in LAYERS):
        return f"served by {layer} of the kernel {kernel}, which is not ours"
    if find_function_reference(_function(use)) is None:
        original = original_function(_function(use))
        stranger = foreign(original, use.file) if original else None
        return f"another library replaced it: {stranger}" if stranger else "no kernel computes what it computes"
    if device_of(module) not in ("npu", None):
        return f"it is on {device_of(module)}: load with device_map='npu', or move the model and call kernelize(model)"
    if kernel is not None:
        return None
    if (left_out := register.left_out("RoPE")) is not None:
        return left_out
    if register.current is None:
        return "kernels are not registered: call kernels_ext_npu.register() before the model is loaded"
    return "no model of the architecture was loaded with use_kernels=True, or restore() was called: kernelize(model)"


def uses(cls: type[nn.Module]) -> tuple[Use, ...]:
    """The rotary functions that the methods of a class call, or the functions of its file that these call."""
    if cls not in _uses:
        _uses[cls] = _find_uses(cls)
    return _uses[cls]


def _find_uses(cls: type[nn.Module]) -> tuple[Use, ...]:
    found: dict[Use, None] = {}
    waiting = [f for base in cls.__mro__ if base not in (nn.Module, object) for f in _functions(vars(base).values())]
    waiting = list(dict.fromkeys(waiting))
    for function in waiting:  # grows while it runs
        module = sys.modules.get(function.__module__)
        if _NOT_MODELS.match(function.__module__) or vars(module or object) is not function.__globals__:
            continue
        for name in sorted(_names(function.__code__) & function.__globals__.keys()):
            value = function.__globals__[name]
            original = original_function(value)
            if original is None:
                continue
            if is_kernel_function(value):
                is_rotary = "rotary" in type(value).kernel_layer_name.lower()
            else:
                is_rotary = find_function_reference(value) is not None or _rotates(name, original)
            if is_rotary:
                found[Use(function.__module__, name)] = None
            elif original.__module__ == function.__module__ and original not in waiting:
                waiting.append(original)
    return tuple(found)


def _rotates(name: str, function: FunctionType) -> bool:
    """By its name, unless it leaves the rotation to a function that has a kernel."""
    if not _ROTATES.match(name):
        return False
    known = (function.__globals__.get(n) for n in _names(function.__code__))
    return not any(find_function_reference(value) for value in known)


def _functions(values: Any) -> Iterator[FunctionType]:
    """The functions in the values of a class, also below decorators."""
    for value in values:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        while isinstance(value, FunctionType):
            yield value
            for inner in inspect.getclosurevars(value).nonlocals.values() if value.__closure__ else ():
                if isinstance(inner, FunctionType):
                    yield inner
            value = getattr(value, "__wrapped__", None)


def _names(code: CodeType) -> set[str]:
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def _function(use: Use) -> Any:
    return vars(sys.modules[use.file]).get(use.name)


def _swapped(function: Any) -> FunctionType | None:
    """What stands in the place of a function's own forward."""
    bound = vars(function).get("forward") if is_kernel_function(function) else None
    return bound.__func__ if isinstance(bound, MethodType) else None  # type: ignore[return-value]


def _wrap(use: Use, layer: str) -> None:
    """As transformers does with its decorator."""
    from kernels import use_kernel_forward_from_hub

    original, names = _function(use), vars(sys.modules[use.file])
    if original not in _wrapped:  # another file may have imported it
        _wrapped[original] = use_kernel_forward_from_hub(layer)(original)
    wrapped = names[use.name] = _wrapped[original]

    def unwrap() -> None:
        if names[use.name] is wrapped:  # unless somebody else has replaced it since
            names[use.name] = original

    _undo.append(unwrap)


def _mark(function: Any, layer: str, mapping: dict[str, dict]) -> None:
    cls, original = type(function), original_function(function)
    assert original is not None
    if cls.kernel_layer_name != layer:  # other devices keep the kernels they had
        mapping[layer] = mapping.get(cls.kernel_layer_name, {}) | mapping[layer]
        _set(cls, "kernel_layer_name", layer)
    if "__reduce__" not in vars(cls):  # by reference: copies and pickles of a model get the module of the process
        _set(cls, "__module__", original.__module__)
        _set(cls, "__reduce__", lambda self: original.__name__)
        _undo.append(lambda: _unswap(function))


def _refuse(function: Any, mapping: dict[str, dict]) -> None:
    """What the mark promises is not what the function computes: it keeps the kernels of other devices."""
    marked = type(function).kernel_layer_name
    suffix = " except npu"
    if str(marked).endswith(suffix):
        return
    entry = {device: kernel for device, kernel in mapping.get(marked, {}).items() if device != "npu"}
    mapping[f"{marked}{suffix}"] = entry
    _undo.append(lambda: mapping.pop(f"{marked}{suffix}", None))
    _set(type(function), "kernel_layer_name", f"{marked}{suffix}")
    _unswap(function)


def _attach(module: nn.Module, name: str, function: nn.Module) -> None:
    attached = vars(module).setdefault("_kernel_funcs", {})
    if any(value is function for value in attached.values()):
        return
    original = original_function(function)
    for key in [k for k, value in attached.items() if original_function(value) is original]:
        del attached[key]  # a copy, or what a pickle of the function became
    attached[name] = function
    reference = weakref.ref(module)
    _undo.append(lambda: _detach(reference(), name, function))


def _detach(module: nn.Module | None, name: str, function: nn.Module) -> None:
    attached = {} if module is None else vars(module).get("_kernel_funcs", {})
    if attached.get(name) is function:
        del attached[name]
        if not attached:
            del vars(module)["_kernel_funcs"]


def _unswap(function: nn.Module) -> None:
    if inspect.ismethod(vars(function).get("forward")):
        del function.forward


def _set(cls: type, name: str, value: Any) -> None:
    before = vars(cls).get(name, ABSENT)
    setattr(cls, name, value)
    _undo.append(lambda: delattr(cls, name) if before is ABSENT else setattr(cls, name, before))
