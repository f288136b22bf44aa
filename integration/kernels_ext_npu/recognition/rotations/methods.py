"""Methods of other people's modules that rotate, found by running them (recognition/rotations/functions.py).

Such a method is a function of its arguments and of plain settings of its module. It is tried on a stand-in that has
these alone.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from torch import nn

from kernels_ext_npu.recognition.function_settings import CONSTANTS, Setting, own_method, read_globals
from kernels_ext_npu.recognition.rotations.functions import Rotation, find_rotation, first_served
from kernels_ext_npu.recognition.rotations.signatures import Signature, candidate_signatures
from kernels_ext_npu.recognition.watched_runs import NotRecognisedError
from kernels_ext_npu.syntax.source_tree import code_names

Members = tuple[tuple[str, Any], ...]  # names and values


class RotatingMethod(Rotation):
    """A method that rotates, of modules with some settings."""

    def __init__(
        self,
        cls: type[nn.Module],
        method: FunctionType,
        members: Members,
        signature: Signature,
        settings: tuple[Setting, ...],
    ) -> None:
        plain: Any = object.__new__(cls)
        held = vars(nn.Module()) | dict(members)
        plain.__dict__.update(held)

        def function(*args: Any, **kwargs: Any) -> Any:
            result = method(plain, *args, **kwargs)
            if vars(plain) != held:
                raise NotRecognisedError("it writes to its members")
            return result

        super().__init__(function, signature, settings)
        self.members = members

    def fits(self, *modules: Any) -> bool:
        """Tell whether a module has the settings that the method was read with."""
        (module,) = modules
        found = ((getattr(module, name, None), value) for name, value in self.members)
        return self.holds() and all(type(each) is type(value) and each == value for each, value in found)


_known: dict[tuple[FunctionType, Members], RotatingMethod | None] = {}


def find_rotating_method(module: nn.Module, method: FunctionType | staticmethod) -> Rotation | None:
    """Return how a method rotates, without a layer if it does something else; None if it cannot be run for a try.

    That is one that reads tensors or children of its module, or whose arguments vary.
    """
    if isinstance(method, staticmethod):
        return find_rotation(method.__func__)  # type: ignore[arg-type]
    if (members := _members_read(module, method)) is None:
        return None
    key = method, members
    known = _known.get(key)
    if key not in _known or (known is not None and not known.holds()):
        cls: Any = type(module)
        settings = read_globals(method, cls)
        signatures = () if settings is None else candidate_signatures(method, 1)
        _known[key] = first_served(RotatingMethod(cls, method, members, each, settings) for each in signatures)  # type: ignore[arg-type]
    return _known[key]


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
