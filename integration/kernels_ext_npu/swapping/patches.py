"""Changes to objects that are not ours, each of which is taken back by what made it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ABSENT = object()


@dataclass(frozen=True)
class _Change:
    """One change: how its place is read and written, what stood there before, and what was put there."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    before: Any
    new: Any

    def undo(self) -> None:
        if self.read() is self.new:  # otherwise somebody else has changed it since, and it is theirs
            self.write(self.before)


class Patches:
    """Changes to objects that are not ours, in the order in which they were made.

    A class, a module and a mapping are kept alive until ``undo()``; any other object is not, and its changes end with
    it.
    """

    def __init__(self) -> None:
        self._changes: list[_Change] = []

    def attribute(self, owner: Any, name: str, new: Any) -> None:
        """Set an attribute of an object, a class or a module.

        Example: ``patches.attribute(Olmo3RMSNorm, "kernel_layer_name", "RMSNormCastLast")``; what the class inherits
        shows again after ``undo()``.
        """
        self.note(owner, name, vars(owner).get(name, ABSENT), new)
        setattr(owner, name, new)

    def note(self, owner: Any, name: str, before: Any, new: Any) -> None:
        """Remember an attribute that somebody else will set to `new` on our word, to take it back."""
        owner_of = (lambda: owner) if isinstance(owner, (type, ModuleType)) else weakref.ref(owner)

        def read() -> Any:
            return ABSENT if owner_of() is None else vars(owner_of()).get(name, ABSENT)

        def write(value: Any) -> None:
            if value is ABSENT:
                delattr(owner_of(), name)
            else:
                setattr(owner_of(), name, value)

        self._changes.append(_Change(read, write, before, new))

    def item(self, mapping: MutableMapping, key: Any, new: Any) -> None:
        """Set an entry of a mapping; `undo` puts back what stood there, or takes it out."""

        def write(value: Any) -> None:
            if value is ABSENT:
                mapping.pop(key, None)
            else:
                mapping[key] = value

        self._changes.append(_Change(lambda: mapping.get(key, ABSENT), write, mapping.get(key, ABSENT), new))
        mapping[key] = new

    def undo(self) -> None:
        """Take everything back, the newest first, and leave alone what somebody else has changed since.

        Raises:
            Exception: what a change raised that could not be taken back; all others were.
        """
        try:
            while self._changes:
                self._changes.pop().undo()
        finally:
            if self._changes:  # one could not be taken back
                self.undo()
