"""What the forward of a module may read of it beside tensors: as long as that stays, it computes the same."""

from __future__ import annotations

import dataclasses
import dis
import functools
import inspect
from argparse import Namespace
from collections.abc import Collection
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
from torch import nn
from transformers import PreTrainedConfig

from kernels_ext_npu.module_state import written_class
from kernels_ext_npu.recognition.function_settings import CONSTANTS
from kernels_ext_npu.syntax.source_tree import code_names, nested_codes

_PLAIN = (*CONSTANTS, torch.Size)
_LIBRARIES = ("torch", "transformers", "builtins", "math")
_OWN_TO_TORCH = {*vars(nn.Module()), "training"}
_MODULE_METHODS = vars(nn.Module).keys()


class Settings(NamedTuple):
    """What a forward may read of a module, but for its weights and what is called as it is."""

    cls: type[nn.Module]  # without what FSDP2 puts in front of it
    forward: Any  # that of the class
    members: tuple[tuple[str, Any], ...]  # numbers, strings and the like of the module or its class, each with its type
    absent: frozenset[str]  # what its code may look for, and the module does not have
    present: frozenset[str]  # the parameters and children that it has
    methods: tuple[tuple[str, Any], ...]  # of the class, and what else it computes when it is asked
    children: tuple[tuple[str, Settings], ...] = ()
    constants: tuple[tuple[FunctionType, str, Any], ...] = ()  # who reads them, their names and values; functions too


def read_settings(module: nn.Module, tensors: Collection[str] = ()) -> Settings | None:
    """Return what a forward may read beside some tensors; None if there is more.

    That is so of other tensors, of objects, of modules inside of modules, and of what torch.jit made.
    """
    if any(isinstance(each, torch.jit.ScriptModule) for each in (module, *module._modules.values())):
        return None
    cls, own = written_class(type(module)), vars(module)
    names = names_read(cls, cls.forward)  # type: ignore[arg-type]
    members = _members_read(module, tensors)
    on_class = {name: inspect.getattr_static(cls, name, None) for name in names.difference(own)}
    members |= {name: value for name, value in on_class.items() if value is not None and is_plain(value)}
    buffers = {name for name, buffer in module._buffers.items() if buffer is not None}
    if not buffers.issubset(tensors) or not all(map(is_setting, members.values())):
        return None
    held_modules = {name: child for name, child in module._modules.items() if child is not None}
    containers = {name for name, child in held_modules.items() if is_container(child)}
    others = {name: child for name, child in held_modules.items() if name in containers or not is_opaque(child)}
    are_unseen = {name for name, child in others.items() if name not in containers and any(child.children())}
    children = {name: None if name in are_unseen else read_settings(child) for name, child in others.items()}
    if None in children.values():
        return None
    frozen = tuple((name, _frozen(value)) for name, value in members.items())
    absent = names.difference(own, on_class.keys() & members.keys())
    constants = tuple(
        (function, path, _frozen(value))
        for function, path in _globals_read(cls, cls.forward)  # type: ignore[arg-type]
        if isinstance(value := _read_global(function, path), (FunctionType, *_PLAIN))
    )
    methods = tuple(
        (name, getattr(cls, name))
        for name, value in sorted(on_class.items())
        if isinstance(value, (FunctionType, staticmethod, property)) and name not in _MODULE_METHODS
    )
    present = frozenset(_present(module))
    return Settings(cls, cls.forward, frozen, absent, present, methods, (*children.items(),), constants)  # type: ignore[arg-type]


def unknown_member(module: nn.Module, tensors: Collection[str] = ()) -> str | None:
    """Return what a forward reads that is no setting, such as an object; None if that is nothing, or a buffer."""
    return next((name for name, value in _members_read(module, tensors).items() if not is_setting(value)), None)


def _members_read(module: nn.Module, tensors: Collection[str]) -> dict[str, Any]:
    """Return the members that a forward reads beside some tensors, and those of its configurations behind a dot."""
    cls, own = written_class(type(module)), vars(module)
    names = names_read(cls, cls.forward)  # type: ignore[arg-type]
    held = {name: own[name] for name in sorted((names & own.keys()) - _OWN_TO_TORCH) if name not in tensors}
    members = {name: value for name, value in held.items() if not is_config(value)}
    for config in held.keys() - members.keys():
        found = {name: getattr(held[config], name, None) for name in names}
        members |= {f"{config}.{name}": each for name, each in found.items() if each is not None and not callable(each)}
    return members


def has_settings(module: Any, settings: Settings) -> bool:
    """Tell whether a module has these settings. Every forward asks, also in a graph, where loops are the least work."""
    if type(module) is not settings.cls and written_class(type(module)) is not settings.cls:
        return False
    if settings.cls.forward is not settings.forward:
        return False
    members, children = vars(module), module._modules
    for path, value in settings.members:
        name, _, inner = path.partition(".")
        found = members[name] if name in members else getattr(settings.cls, name, None)
        if _frozen(getattr(found, inner, None) if inner else found) != value:
            return False
    for name, method in settings.methods:
        if getattr(settings.cls, name, None) is not method:
            return False
    for function, path, value in settings.constants:
        if _frozen(_read_global(function, path)) != value:
            return False
    for child, theirs in settings.children:
        if not has_settings(children.get(child), theirs):
            return False
    return settings.absent.isdisjoint(members) and _present(module) == settings.present


def numbers(module: nn.Module, kind: type | tuple[type, ...] = (int, float)) -> set[Any]:
    """Return the numbers that a module holds, and that stand in the code of its class and its bases."""
    classes = [base for base in type(module).__mro__ if base not in (nn.Module, object)]
    constants = [constant for cls in classes for code in codes_in(cls) for constant in code.co_consts]
    values = [*vars(module).values(), *(value for cls in classes for value in vars(cls).values()), *constants]
    return {value for value in values if isinstance(value, kind) and not isinstance(value, bool)}


def is_setting(value: Any) -> bool:
    """Tell whether a value is one that does not change by itself: a number, a string, a function, or some of these."""
    if isinstance(value, tuple) or type(value) in (list, dict):
        return all(map(is_setting, value.values() if type(value) is dict else value))
    if type(value) is functools.partial:
        return is_setting((value.func, *value.args, *value.keywords.values()))
    is_function = isinstance(value, FunctionType) and (value.__closure__ is None or value.__module__[:6] == "torch.")
    return is_plain(value) or is_function or isinstance(value, BuiltinFunctionType)


def is_config(value: Any) -> bool:
    """Tell whether a value is a configuration, of which a forward may read attributes."""
    is_known = isinstance(value, (PreTrainedConfig, SimpleNamespace, Namespace)) or dataclasses.is_dataclass(value)
    return is_known and not isinstance(value, (nn.Module, type))


def is_plain(value: Any) -> bool:
    """Tell whether a value is a constant: a number, a string, a dtype or a size.

    Numbers of numpy are tensors in a graph, which could not be compared there.
    """
    return isinstance(value, _PLAIN) and not isinstance(value, numpy.generic)


def _frozen(value: Any) -> Any:
    """Return a setting with its type, to be compared: of a container, and of a partial function, what is in it.

    By its type a tensor is equal to no setting: to compare its values, the host would wait for them.
    """
    if isinstance(value, tuple) or type(value) in (list, dict):
        return type(value), *map(_frozen, value.items() if type(value) is dict else value)
    if type(value) is functools.partial:
        return functools.partial, *map(_frozen, (value.func, value.args, value.keywords))
    return type(value), value


def _present(module: nn.Module) -> set[str]:
    places = module._parameters, module._modules, module._buffers
    return {name for place in places for name, value in place.items() if value is not None}


@functools.cache
def names_read(cls: type[nn.Module], _: Any) -> frozenset[str]:
    """Return the names in the methods of a class with this forward, and in strings that may be names."""
    codes = _codes_called(cls)
    strings = {constant for code in codes for constant in code.co_consts if isinstance(constant, str)}
    names = {name for code in codes for name in code.co_names} | set(filter(str.isidentifier, strings))
    names -= names_written(cls, cls.forward)  # type: ignore[arg-type]
    return frozenset(names - {"forward"})  # under which ours is bound


@functools.cache
def names_written(cls: type[nn.Module], _: Any) -> frozenset[str]:
    """Return the attributes that the methods of a class with this forward set, and that none of them reads."""
    codes = _codes_called(cls)
    steps = [step for code in codes for step in dis.get_instructions(code) if isinstance(step.argval, str)]
    written = {step.argval for step in steps if step.opname == "STORE_ATTR"}
    return frozenset(written.difference(step.argval for step in steps if step.opname != "STORE_ATTR"))


def _codes_called(cls: type[nn.Module]) -> list[CodeType]:
    bases = [base for base in cls.__mro__ if base not in (nn.Module, object)]
    return [code for base in bases for code in codes_in(base) if code.co_name != "__init__"]  # which no forward calls


@functools.cache
def _globals_read(cls: type[nn.Module], _: Any) -> tuple[tuple[FunctionType, str], ...]:
    """Return the names of globals in the methods of a class with this forward, and in functions that they call.

    Behind a dot stands what they may read of a class, a module of Python or a configuration.
    """
    waiting = [function for base in cls.__mro__ for function in _functions_in(base)]
    found: list[tuple[FunctionType, str]] = []
    for function in waiting:  # grows while it runs
        names = function.__globals__
        if names.get("__name__", "").startswith(("torch.", "transformers.")):
            continue
        read = code_names(function.__code__)
        for name in sorted(read & names.keys()):
            value = names[name]
            if isinstance(value, FunctionType):
                found.append((function, name))
                waiting += [value] if value not in waiting else []
            elif is_plain(value):
                found.append((function, name))
            elif is_config(value) or (isinstance(value, (type, ModuleType)) and not _is_fixed(value)):
                own = getattr(value, "__dict__", {})  # one with slots may be changed, too, and is not seen to be
                found += [(function, f"{name}.{each}") for each in sorted(read & own.keys())]
    return tuple(found)


def _is_fixed(value: Any) -> bool:
    """Tell whether a class or a module of Python is of a library whose constants do not change."""
    return str(getattr(value, "__module__", value.__name__)).partition(".")[0] in _LIBRARIES


def _read_global(function: FunctionType, path: str) -> Any:
    name, _, inner = path.partition(".")
    found = function.__globals__.get(name)
    return getattr(found, inner, None) if inner else found


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def is_opaque(child: Any) -> bool:
    """Tell whether a child is called as it is: a projection, a dropout, or what has parameters of its own."""
    drops = isinstance(child, nn.Dropout) and child.p > 0
    return drops or is_linear(child) or any(True for _ in chain(child.parameters(), child.buffers()))


def is_container(child: Any) -> bool:
    """Tell whether a child holds others, or calls them in turn, which are seen as children of the module themselves."""
    holds_others = type(child) not in _CONTAINERS or any(any(each.children()) for each in child.children())
    return not holds_others and read_settings(child) is not None


def opaque_children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module, also in containers, that are called as they are, by their paths."""
    found: dict[str, nn.Module] = {}
    for name, child in module._modules.items():
        held = {f"{name}.{n}": each for n, each in child._modules.items()} if is_container(child) else {name: child}  # type: ignore[union-attr]
        found |= {path: each for path, each in held.items() if each is not None and is_opaque(each)}
    return found


def is_linear(child: Any) -> bool:
    """Tell whether a child has the sizes of torch's linear layers, and with them what these do to each token."""
    return hasattr(child, "in_features") and hasattr(child, "out_features")


def codes_in(cls: type) -> list[CodeType]:
    """Return the code of the methods of a class itself, also of decorated ones, and of the functions in them."""
    return [code for function in _functions_in(cls) for code in nested_codes(function.__code__)]


def _functions_in(cls: type) -> list[FunctionType]:
    functions = [value for value in vars(cls).values() if isinstance(value, FunctionType)]
    functions += [each for each in map(inspect.unwrap, functions) if isinstance(each, FunctionType)]
    return list(dict.fromkeys(functions))
