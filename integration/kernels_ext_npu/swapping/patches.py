"""Changes to objects that are not ours, each of which is taken back by what made it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ABSENT = object()


@dataclass(frozen=True)
class _Change:
    """One change: how its place is read and written, what stood there before, and what was put there.

    `is_of` tells whether its place is an attribute of an object.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]
    before: Any
    new: Any
    is_of: Callable[[Any, str], bool] = lambda owner, name: False

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

        self._changes.append(_Change(read, write, before, new, lambda o, n: o is owner_of() and n == name))

    def method(self, owner: type, name: str, replacement: Callable, is_in_use: Callable[[], bool]) -> None:
        """Let calls of a method go to `replacement(original, self, ...)`.

        While it is not in use they go to the original: somebody may have wrapped ours since, so that it stays below.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_in_use():
                return original(self, *args, **kwargs)
            return replacement(original, self, *args, **kwargs)

        self.attribute(owner, name, wrapped)

    def before(self, owner: Any, name: str) -> Any:
        """Return what an attribute was before it was changed; ABSENT where it was not."""
        return next((change.before for change in self._changes if change.is_of(owner, name)), ABSENT)

    def give_back(self, owner: Any, name: str) -> None:
        """Take back what was changed of one attribute, as `undo` does."""
        found = [change for change in self._changes if change.is_of(owner, name)]
        self._changes = [change for change in self._changes if not change.is_of(owner, name)]
        for change in reversed(found):
            change.undo()

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
