"""Modules of other people's code that rotate, found by running them (recognition/rotations/functions.py).

Such a module is a function of its arguments and of the tensors that it holds: a table of angles, cos and sin, or
frequencies. It is tried with random numbers in the place of both, on a stand-in that shares its settings.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_ext_npu.matching.classification import ROTATING_NAMES, classify_class
from kernels_ext_npu.recognition.computed import Computed
from kernels_ext_npu.recognition.function_settings import Setting, read_globals
from kernels_ext_npu.recognition.module_settings import names_read, numbers
from kernels_ext_npu.recognition.rotations.forms import forms_with
from kernels_ext_npu.recognition.rotations.functions import Rotation
from kernels_ext_npu.recognition.rotations.signatures import Signature
from kernels_ext_npu.recognition.stand_ins import on_stand_in

_ANGLES = {"cos", "polar"}  # which a module calls that holds no tensor


class RotatingModule(Rotation):
    """A module that rotates, which holds tensors of some shapes."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], helpers: tuple[Setting, ...]) -> None:
        signature = Signature(type(module).forward, 1)  # type: ignore[arg-type]
        forms = forms_with(signature, held_tensors(module, names), () if names else numbers(module, int))
        super().__init__(stand_in_function(module, names, signature), signature, helpers, forms)
        self.names = names


def tensor_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the tensors that a forward may read of a module without parameters and children."""
    if any(each is not None for each in (*module._parameters.values(), *module._modules.values())):
        return ()
    read = names_read(type(module), type(module).forward)  # type: ignore[arg-type]
    own = [name for name, value in vars(module).items() if name in read and isinstance(value, Tensor)]
    return (*(name for name, buffer in module._buffers.items() if buffer is not None), *own)


def held_tensors(module: nn.Module, names: tuple[str, ...]) -> list[Any]:
    """Return what a module holds under the names of tensors."""
    return [module._buffers.get(name, vars(module).get(name)) for name in names]


def read_helpers(cls: Any, names: tuple[str, ...]) -> tuple[Setting, ...] | None:
    """Return what a forward reads outside of its module; None if the module is not to be run for a rotation.

    That is one that neither holds tensors nor makes angles, or reads what is neither code nor a constant.
    """
    if not isinstance(cls.forward, FunctionType) or (not names and _ANGLES.isdisjoint(names_read(cls, cls.forward))):
        return None
    return read_globals(cls.forward, cls)


def find_rotating_module(helpers: tuple[Setting, ...], module: nn.Module) -> Computed | None:
    """Return the layer that rotates as a module does; none of one that is called so, and does what no rotation does."""
    cls, found = type(module), RotatingModule(module, tensor_names(module), helpers)
    if not found.signature.is_plain:
        return None
    is_called_so = classify_class(cls) is None and ROTATING_NAMES.search(cls.__name__.lower())
    return Computed(found.layer, rotation=found) if found.layer or (found.refused and is_called_so) else None


def stand_in_function(module: nn.Module, names: tuple[str, ...], signature: Signature) -> Callable:
    """Return a function of the arguments of a module and of its tensors, which keeps nothing of them."""
    cls: Any = type(module)
    read = names_read(cls, cls.forward)
    others = {name: value for name, value in vars(module).items() if name in read and name not in names}
    forward, buffer_names = on_stand_in(cls, cls.forward, others), tuple(module._buffers)

    def function(*values: Any) -> Any:
        tensors = dict(zip(names, values[len(signature.names) :]))
        buffers = {name: tensors.pop(name, None) for name in buffer_names}
        # as a module has it that is trained or not, and torch then
        held = {"_buffers": buffers, "training": torch.is_grad_enabled(), **tensors}
        return signature.call(functools.partial(forward, held), values)

    return function
