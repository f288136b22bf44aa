"""Rotary functions, methods and modules of other people's code, found by running them (recognition/rotations/).

Such a function, or the forward of such a module, is asked for cos and sin as it has them, by a call for one head, and
the kernel rotates by those. They are kept for the layers that rotate by the same tensors. A call of another kind, on
another device, under ``torch.compile`` or with angles that are trained is the function's own.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.devices import is_capturing
from kernels_ext_npu.binding.loaded_kernels import MATCHED, class_forward
from kernels_ext_npu.binding.step_aside import guarded_forward
from kernels_ext_npu.catalogue import LAYERS
from kernels_ext_npu.recognition.function_settings import IN_PLACE
from kernels_ext_npu.recognition.module_settings import has_settings
from kernels_ext_npu.recognition.rotations.functions import Plan, Rotation, ask, make_question
from kernels_ext_npu.recognition.rotations.modules import held_tensors
from kernels_ext_npu.swaps.recognised.layer_forwards import Members

if TYPE_CHECKING:
    from kernels_ext_npu.recognition.computed import Recognised

_ROTATIONS = "_kernels_rotations"  # attribute of a method of ours: what it rotates as, by the kernel
Rotations = dict[Rotation, "_Rotate"]


def make_forward(found: Rotation) -> FunctionType:
    """Return the forward that rotates by the kernel, for the module of a function."""
    rotate = _Rotate(found)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not found.holds():
            return found.function(*args, **kwargs)
        return rotate(found.function, args, kwargs)

    return forward  # type: ignore[return-value]


def make_module_forward(what: Recognised, matched: FunctionType) -> FunctionType:
    """Return the forward that rotates by the kernel, for modules of a class that were recognised as the same."""
    found: Any = what.computed.rotation
    rotate = _Rotate(found)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = functools.partial(class_forward(self, forward, matched), self)
        if torch.compiler.is_compiling() or not (has_settings(self, what.settings) and found.holds()):
            return own(*args, **kwargs)
        return rotate(own, args, kwargs, held_tensors(self, found.names), self)

    setattr(forward, MATCHED, matched)
    return forward  # type: ignore[return-value]


def make_table_forward(package: ModuleType, what: Recognised, matched: FunctionType) -> FunctionType:
    """Return the forward that makes cos and sin by the kernel, for modules that were recognised as the same."""
    computed = what.computed
    layer, numbers = getattr(package.layers, computed.layer).forward, dict(computed.numbers)
    name: Any = dict(computed.parameters)["inv_freq"]

    def holds(module: nn.Module) -> bool:
        is_cast = not computed.casts and torch.is_autocast_enabled("npu")
        return not is_cast and has_settings(module, what.settings)

    def forward(self: nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        (inv_freq,) = held_tensors(self, (name,))
        is_aside = computed.wants_one_dtype and inv_freq.dtype is not torch.float32
        is_aside |= inv_freq.requires_grad or inv_freq.dim() != 1 or x.device != position_ids.device
        if is_aside or position_ids.dim() != 2 or position_ids.is_floating_point():
            return matched(self, x, position_ids)
        return layer(Members(inv_freq=inv_freq, **numbers), x, position_ids)

    def longer_forward(self: nn.Module, x: Tensor, position_ids: Tensor, unread: Any = None) -> tuple[Tensor, Tensor]:
        return forward(self, x, position_ids)

    takes_more = len(inspect.signature(matched).parameters) > 3
    return guarded_forward(longer_forward if takes_more else forward, matched, holds)  # type: ignore[arg-type]


def place_method(cls: type, name: str, found: Rotation) -> None:
    """Let a method of a class rotate by the kernel for modules whose settings are those that it was found with."""
    original, rotations = method_in_place(cls, name)
    if rotations is None:
        assert registration.current is not None
        rotations = {}
        registration.current.patches.attribute(cls, name, _make_method(original, rotations))
    if found not in rotations:
        rotations[found] = _Rotate(found)


def method_in_place(cls: type, name: str) -> tuple[FunctionType | staticmethod, Rotations | None]:
    """Return a method as its class has it, and the rotations for which another is there in its place; None if none."""
    value = vars(cls)[name]
    function = getattr(value, "__func__", value)
    return getattr(function, IN_PLACE, value), getattr(function, _ROTATIONS, None)


def _make_method(original: FunctionType | staticmethod, rotations: Rotations) -> FunctionType | staticmethod:
    is_static, function = isinstance(original, staticmethod), getattr(original, "__func__", original)

    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        module, given = ((), args) if is_static else (args[:1], args[1:])
        for found, rotate in () if torch.compiler.is_compiling() else rotations.items():
            if found.holds(*module):
                return rotate(functools.partial(function, *module), given, kwargs)
        return function(*args, **kwargs)

    setattr(method, IN_PLACE, original)
    setattr(method, _ROTATIONS, rotations)
    return staticmethod(method) if is_static else method  # type: ignore[return-value]


class _Rotate:
    """Computes by the kernel what was found to rotate, or leaves a call to that itself."""

    def __init__(self, found: Rotation) -> None:
        self._found, self._cos_and_sin = found, _CosAndSin()
        self._by_kernel = registration.package(LAYERS["RotaryPosEmb"]).rotary_mul

    def __call__(
        self,
        function: Callable,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        held: Sequence[Any] = (),
        owner: object = None,
    ) -> Any:
        """Rotate what a function is given.

        Args:
            function: what computes it otherwise, and is asked for cos and sin.
            args: of the call.
            kwargs: of the call.
            held: the tensors of a module.
            owner: that module.
        """
        found = self._found
        asked = _asked(found, args, kwargs, held)
        if asked is None:
            return function(*args, **kwargs)
        values, plan = asked
        tensors, tables = values[: plan.form.rotated], plan.form.tables(values)
        floats = [table.dtype for table in tables if table.is_floating_point()]
        dtypes = found.dtypes(plan, tensors[0].dtype, floats[0] if floats else torch.float32)
        if dtypes is None:
            return function(*args, **kwargs)
        call = functools.partial(found.signature.call, function)
        lives = held[0] if held else tables[0] if owner is None else owner  # as long as which cos and sin are kept
        both = self._cos_and_sin(lambda *values: call(values), plan, values, dtypes.asked, lives)
        if both is None:
            return function(*args, **kwargs)
        results = [plan.pairing.rotate(x, *both, self._by_kernel).to(dtypes.result) for x in tensors]
        return results[0] if plan.makes is Tensor else plan.makes(results)


def _asked(
    found: Rotation, args: Sequence[Any], kwargs: Mapping[str, Any], held: Sequence[Any]
) -> tuple[list[Any], Plan] | None:
    """Return what is given in a call and held, and what is computed of it; None where the kernel is not to compute."""
    values = found.signature.values(args, kwargs)
    if values is None or torch._C._are_functorch_transforms_active():
        return None
    given = len(values)
    plan = found.plan(values := [*values, *held])
    if plan is None:
        if found.left is None:
            here = [each for each in values[:given] if isinstance(each, Tensor) and each.device.type == "npu"]
            found.left = " and ".join(str([*each.shape]) for each in here) or None
        return None
    if values[0].device.type != "npu":
        return None
    tensors, tables = values[: plan.form.rotated], plan.form.tables(values)
    if len({table.dtype for table in tables if table.is_floating_point()}) > 1:
        return None
    if {x.dtype for x in tensors} != {values[0].dtype} or not values[0].numel():
        return None
    if plan.multiplies and torch.is_autocast_enabled("npu"):
        return None
    if torch.is_grad_enabled() and any(table.requires_grad for table in tables):
        return None
    # where a module holds its tensors is up to its forward
    are_here = (x.device == values[0].device for x in (*tensors, *plan.form.tables(values[:given])))
    return (values, plan) if all(are_here) else None


# values of which the launches count, and not the bytes: to move so many takes less than to launch an operator.
# Where each layer makes angles of its own, the function takes fewer launches than the question and the kernel
_FEW = 1 << 18
_CALLS = {1: 2, 2: 1}  # how often a layer calls what rotates so many: for q, and for k


class _CosAndSin:
    """Asks a function for cos and sin, and keeps the last of each tensor of angles as long as that lives."""

    def __init__(self) -> None:
        self._left: deque[Any] = deque(maxlen=3)  # what was asked for last, and is not kept
        # by what the first tensor of angles is a view of, or by a module: the key, other tensors, cos and sin
        self._kept = WeakIdKeyDictionary()

    def __call__(
        self, function: Callable, plan: Plan, values: Sequence[Any], dtype: torch.dtype, lives: Any
    ) -> tuple[Tensor, Tensor] | None:
        """Return cos and sin; None for few tokens of inference that are the first to rotate by their angles."""
        tables = plan.form.tables(values)
        are_few = not torch.is_grad_enabled() and values[0].numel() < _FEW
        # a graph computes what was made in it alone; modes see operators, and those have to be the same each time
        if torch._C._len_torch_dispatch_stack() or any(map(Tensor.is_inference, tables)) or is_capturing():
            return None if are_few else ask(function, plan, values, dtype, make_question)
        bases = [_base(table) for table in tables]
        lie = [(id(b), t._version, t.storage_offset(), t.shape, t.stride()) for b, t in zip(bases, tables)]
        numbers = [value for value in values if type(value) is int]
        key = dtype, plan, plan.form.asked_shape(values), values[0].device, lie, numbers
        lives = _base(lives)
        kept = self._kept.get(lives)
        if kept is None or kept[0] != key:
            self._left.append(key)
            if are_few and self._left.count(key) <= _CALLS[plan.form.rotated]:
                return None
            with torch.inference_mode(False):
                made = ask(function, plan, values, dtype, _question)
            kept = self._kept[lives] = key, [base for base in bases if base is not lives], made
        return kept[2]


def _base(value: Any) -> Any:
    """Return what a tensor is a view of, or the value itself."""
    base = getattr(value, "_base", None)
    return value if base is None else base


_question = functools.lru_cache(maxsize=64)(make_question)
