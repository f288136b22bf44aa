"""The parameters of functions, methods and modules that may rotate, and what they are given in a call."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any


class Signature:
    """The parameters of a function, and their defaults; those that have to be named come last.

    What a function takes and does not read is left out of calls, or is its default. Values have what is rotated first.

    Args:
        function: whose parameters they are.
        skipped: how many it has that are no part of a call.
        angles: how many that hold angles are in front of what is rotated.
    """

    def __init__(self, function: FunctionType, skipped: int = 0, angles: int = 0) -> None:
        everything = list(inspect.signature(function).parameters.values())[skipped:]
        others = [p for p in everything if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        parameters = [p for p in everything if p not in others]
        read = _names_read(function)
        self._own = inspect.Signature(everything)
        parameters = [p if p.name in read else p.replace(default=None, annotation=p.empty) for p in parameters]
        self.names = [p.name for p in parameters]
        self.defaults = [p.default for p in parameters]  # None of those that it does not read
        self._unread = [place for place, name in enumerate(self.names) if name not in read]
        self.positional = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)  # may be given without a name
        whole = [p.default is p.empty and p.annotation in (int, "int") for p in parameters]
        tensors = (p.default is p.empty and not is_whole for p, is_whole in zip(parameters, whole))
        # how many of the first have no default, and are no whole numbers; and the places of those that are
        self.required, self._angles = sum(itertools.takewhile(bool, tensors)), angles
        self.dimensions = [place for place, is_whole in enumerate(whole) if is_whole]
        # it reads no others, and no default can be written to
        self.is_plain = all(p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) for p in parameters)
        self.is_plain &= read.isdisjoint(p.name for p in others)
        self.is_plain &= not any(isinstance(default, (dict, list, set)) for default in self.defaults)

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
        """Return what each parameter is given in a call, rotated first; None if the function would refuse it."""
        try:
            given = self._own.bind(*args, **kwargs)
        except TypeError:
            return None
        given.apply_defaults()
        values = [self.defaults[i] if i in self._unread else given.arguments[n] for i, n in enumerate(self.names)]
        return [*self._turn(values, self._angles)]

    def call(self, function: Callable, values: Sequence[Any]) -> Any:
        """Call a function with what each parameter is given, rotated first, and leave what is beyond that."""
        values = self._turn(values, self.required - self._angles)
        named = dict(zip(self.names[self.positional :], values[self.positional :]))
        return function(*values[: self.positional], **named)

    def _turn(self, values: Sequence[Any], count: int) -> Sequence[Any]:
        """Return values with the first of them behind the others that are required."""
        return (*values[count : self.required], *values[:count], *values[self.required :]) if self._angles else values


def candidate_signatures(function: FunctionType, skipped: int = 0) -> Iterator[Signature]:
    """Yield the parameters of a function, with what is rotated first or behind its angles; none if some need names."""
    for angles in range(3):
        signature = Signature(function, skipped, angles)
        has_options = inspect.Parameter.empty not in signature.defaults[signature.positional :]
        if not (signature.is_plain and has_options) or (angles and signature.required <= angles):
            return
        yield signature


def _names_read(function: FunctionType) -> set[str]:
    """Return the names of variables that the code of a function reads."""
    steps = dis.get_instructions(inspect.unwrap(function))
    read = [step.argval for step in steps if step.opname.startswith("LOAD_")]
    return {name for each in read for name in (each if isinstance(each, tuple) else (each,)) if isinstance(name, str)}
