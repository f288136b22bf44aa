"""The parameters of functions, methods and modules that may rotate, and what they are given in a call."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any


class Signature:
    """The parameters of a function, and their defaults; those that have to be named come last.

    Any others that a function takes, and does not read, are left out of calls.

    Attributes:
        names: of the parameters.
        defaults: of them.
        positional: how many may be given without a name.
        dimensions: the places of those that are whole numbers without a default.
        is_plain: whether it reads no others, and no default can be written to.
    """

    def __init__(self, function: FunctionType, skipped: int = 0) -> None:
        everything = list(inspect.signature(function).parameters.values())[skipped:]
        others = [p for p in everything if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        parameters = [p for p in everything if p not in others]
        self.names = [p.name for p in parameters]
        self.defaults = [p.default for p in parameters]
        self.positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        whole = [p.default is p.empty and p.annotation in (int, "int") for p in parameters]
        self.dimensions = [place for place, is_whole in enumerate(whole) if is_whole]
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in others)
        self.is_plain = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
        self.is_plain &= not any(_reads(function, p.name) for p in others)
        self.is_plain &= not any(isinstance(default, (dict, list, set)) for default in self.defaults)

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return what each parameter is given in a call; None if the function would refuse it."""
        values = [*args, *self.defaults[len(args) :]]
        for name, value in kwargs.items():
            if name in self.names[len(args) :]:
                values[self.names.index(name)] = value
            elif name in self.names or not self._takes_any:
                return None
        is_whole = len(args) <= self.positional and all(value is not inspect.Parameter.empty for value in values)
        return values if is_whole else None

    def call(self, function: Callable, values: Sequence[Any]) -> Any:
        """Call a function with what each parameter is given, and leave what is beyond that."""
        named = dict(zip(self.names[self.positional :], values[self.positional :]))
        return function(*values[: self.positional], **named)


class TableFirst(Signature):
    """The parameters of a function whose second is rotated, and whose first holds the angles: in the other order."""

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return what each parameter is given in a call; None if the function would refuse it."""
        found = super().values(args, kwargs)
        return None if found is None else [found[1], found[0], *found[2:]]

    def call(self, function: Callable, values: Sequence[Any]) -> Any:
        """Call a function with what each parameter is given."""
        return super().call(function, [values[1], values[0], *values[2:]])


def _reads(function: FunctionType, name: str) -> bool:
    """Tell whether the code of a function reads one of its variables."""
    steps = dis.get_instructions(inspect.unwrap(function))
    read = [step.argval for step in steps if step.opname.startswith("LOAD_")]
    return any(name == each or (isinstance(each, tuple) and name in each) for each in read)
