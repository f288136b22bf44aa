"""Instances that stand in for a module: of its class, with what it holds, but for other tensors and children."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kernels_ext_npu.recognition.computed import NotRecognisedError
from kernels_ext_npu.recognition.module_settings import is_config


def stand_in(module: nn.Module, members: dict[str, Any]) -> nn.Module:
    """Return an instance of a module's class with other members."""
    made: Any = object.__new__(type(module))
    own = {name: value for name, value in vars(module).items() if name != "forward"}
    configs = {name: copy.copy(value) for name, value in own.items() if is_config(value)}
    made.__dict__.update(copied(own) | configs | members)
    return made


def on_stand_in(cls: type, method: Callable, members: dict[str, Any]) -> Callable:
    """Return a method as a function, which is called on an instance of a class that holds some members alone.

    It takes further ones in front of its arguments, and keeps nothing of these.
    """
    plain: Any = object.__new__(cls)
    plain.__dict__.update(vars(nn.Module()) | members)

    def function(further: dict[str, Any], /, *args: Any, **kwargs: Any) -> Any:
        made = stand_in(plain, further)
        before = snapshot(made)
        result = method(made, *args, **kwargs)
        if snapshot(made) != before:
            raise NotRecognisedError("it writes to its members")
        return result

    return function


def filled(module: nn.Module, fill: Callable[[Tensor], Tensor], **members: Any) -> nn.Module:
    """Return a stand-in with other tensors in the place of all that a module and those inside of it hold."""
    for kind in ("_parameters", "_buffers"):
        members[kind] = {name: None if each is None else fill(each) for name, each in vars(module)[kind].items()}
    children = {name: None if c is None else filled(c, fill, **members) for name, c in module._modules.items()}
    return stand_in(module, {**members, "_modules": children})


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Return what a module holds, and what its configurations, dictionaries and lists do."""
    members = vars(module)
    return copied(members) | {name: dict(vars(value)) for name, value in members.items() if is_config(value)}


def copied(value: Any) -> Any:
    """Return a container with copies of those in it; anything else as it is."""
    if type(value) is dict:
        return {key: copied(each) for key, each in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
