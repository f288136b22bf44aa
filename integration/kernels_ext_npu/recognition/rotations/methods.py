"""Methods of other people's modules that rotate, found by running them (recognition/rotations/functions.py).

Such a method is a function of its arguments and of plain settings of its module. It is tried on a stand-in that has
these alone.
"""

from __future__ import annotations

from types import FunctionType

from torch import nn

from kernels_ext_npu.recognition.function_settings import CONSTANTS, own_method
from kernels_ext_npu.recognition.rotations.functions import Members, Rotation, find_rotation
from kernels_ext_npu.syntax.source_tree import code_names


def find_rotating_method(module: nn.Module, method: FunctionType | staticmethod) -> Rotation | None:
    """Return how a method rotates, without a layer if it does something else; None if it cannot be run for a try.

    That is one that reads tensors or children of its module, or whose arguments vary.
    """
    if isinstance(method, staticmethod):
        return find_rotation(method.__func__)  # type: ignore[arg-type]
    members = _members_read(module, method)
    return None if members is None else find_rotation(method, type(module), members)


def _members_read(module: nn.Module, method: FunctionType) -> Members | None:
    """Return the settings that a method and the methods that it calls read; None if they read other members."""
    own = [vars(base) for base in type(module).__mro__ if base not in (nn.Module, object)]
    members = {name: value for place in reversed((vars(module), *own)) for name, value in place.items()}
    names: set[str] = set()
    waiting = [method]
    for function in waiting:  # grows while it runs
        read = code_names(function.__code__) - names
        names |= read
        called = [own_method(members[name]) for name in read & members.keys()]
        waiting += [each for each in called if isinstance(each, FunctionType) and each not in waiting]
    if names & {*module._parameters, *module._buffers, *module._modules}:
        return None
    found = {name: members[name] for name in sorted(names & members.keys())}
    settings = tuple((name, value) for name, value in found.items() if isinstance(value, CONSTANTS))
    others = {name: value for name, value in found.items() if not isinstance(value, CONSTANTS)}
    are_methods = all(isinstance(value, (FunctionType, staticmethod, classmethod)) for value in others.values())
    return settings if are_methods and others.keys().isdisjoint(vars(module)) else None
