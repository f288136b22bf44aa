"""Patches of objects of other libraries, undone by the `Patches` that made them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ABSENT = object()


@dataclass(frozen=True, eq=False)
class _Change:
    """One change: the object, its attribute (None in a mapping), and what undoes it.

    Where somebody else has changed the value since, undoing leaves it alone.
    """

    owner: Callable[[], Any]
    name: str | None
    undo: Callable[[], None]


class Patches:
    """Patches of objects of other libraries, in the order in which they were made.

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
        """Remember an attribute that other code sets to `new` for us, so that `undo` puts `before` back."""
        found = (lambda: owner) if isinstance(owner, (type, ModuleType)) else weakref.ref(owner)

        def undo() -> None:
            changed = found()
            if changed is None or vars(changed).get(name, ABSENT) is not new:
                return
            if before is ABSENT:
                delattr(changed, name)
            else:
                setattr(changed, name, before)

        self._changes.append(_Change(found, name, undo))

    def method(self, owner: type | ModuleType, name: str, new: Callable, is_in_use: Callable[[], bool]) -> None:
        """Let calls of a method go to `new(original, self, ...)`, of a function to `new(original, ...)`.

        While it is not in use they go to the original: somebody may have wrapped ours since, so that it stays below.
        """
        original = getattr(owner, name)

        @functools.wraps(original)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return new(original, *args, **kwargs) if is_in_use() else original(*args, **kwargs)

        self.attribute(owner, name, wrapped)

    def give_back(self, owner: Any, name: str) -> None:
        """Take back what was changed of one attribute, as `undo` does."""
        found = [change for change in self._changes if change.name == name and change.owner() is owner]
        self._changes = [change for change in self._changes if change not in found]
        for change in reversed(found):
            change.undo()

    def knows(self, owner: Any, name: str) -> bool:
        """Tell whether an attribute of an object was changed or noted."""
        return any(change.owner() is owner for change in self._changes if change.name == name)

    def item(self, mapping: MutableMapping, key: Any, new: Any) -> None:
        """Set an entry of a mapping; `undo` puts back what stood there, or takes it out."""
        self.items(mapping, {key: new})

    def items(self, mapping: MutableMapping, new: Mapping) -> None:
        """Set entries of a mapping, in one change."""
        before = {key: mapping.get(key, ABSENT) for key in new}

        def undo() -> None:
            for key, value in before.items():
                if mapping.get(key, ABSENT) is not new[key]:
                    continue
                if value is ABSENT:
                    del mapping[key]
                else:
                    mapping[key] = value

        self._changes.append(_Change(lambda: mapping, None, undo))
        mapping.update(new)

    def at_the_end(self, undo: Callable[[], None]) -> None:
        """Let `undo` call a function, in the order of the changes."""
        self._changes.append(_Change(lambda: None, None, undo))

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
