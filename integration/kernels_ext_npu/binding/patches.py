"""Changes to objects that are not ours, each of which is taken back by what made it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

ABSENT = object()


@dataclass(frozen=True, eq=False)
class _Attribute:
    """An attribute of an object, what it was before, and what it was set to."""

    owner: Callable[[], Any]
    name: str
    before: Any
    new: Any

    def undo(self) -> None:
        """Take it back, unless somebody else has changed it since: then it is theirs."""
        owner = self.owner()
        if owner is None or vars(owner).get(self.name, ABSENT) is not self.new:
            return
        if self.before is ABSENT:
            delattr(owner, self.name)
        else:
            setattr(owner, self.name, self.before)


@dataclass(frozen=True, eq=False)
class _Entries:
    """Entries of a mapping: what stood there before, and what was put there."""

    mapping: MutableMapping
    before: Mapping
    new: Mapping

    def undo(self) -> None:
        """Take them back, but for those that somebody else has changed since."""
        for key, value in self.before.items():
            if self.mapping.get(key, ABSENT) is not self.new[key]:
                continue
            if value is ABSENT:
                del self.mapping[key]
            else:
                self.mapping[key] = value


class Patches:
    """Changes to objects that are not ours, in the order in which they were made.

    A class, a module and a mapping are kept alive until ``undo()``; any other object is not, and its changes end with
    it.
    """

    def __init__(self) -> None:
        self._changes: list[_Attribute | _Entries] = []

    def attribute(self, owner: Any, name: str, new: Any) -> None:
        """Set an attribute of an object, a class or a module.

        Example: ``patches.attribute(Olmo3RMSNorm, "kernel_layer_name", "RMSNormCastLast")``; what the class inherits
        shows again after ``undo()``.
        """
        self.note(owner, name, vars(owner).get(name, ABSENT), new)
        setattr(owner, name, new)

    def note(self, owner: Any, name: str, before: Any, new: Any) -> None:
        """Remember an attribute that somebody else will set to `new` on our word, to take it back."""
        found = (lambda: owner) if isinstance(owner, (type, ModuleType)) else weakref.ref(owner)
        self._changes.append(_Attribute(found, name, before, new))

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
        found = [c for c in self._changes if isinstance(c, _Attribute) and c.name == name and c.owner() is owner]
        self._changes = [change for change in self._changes if change not in found]
        for change in reversed(found):
            change.undo()

    def knows(self, owner: Any, name: str) -> bool:
        """Tell whether an attribute of an object was changed or noted."""
        return any(isinstance(c, _Attribute) and c.name == name and c.owner() is owner for c in self._changes)

    def item(self, mapping: MutableMapping, key: Any, new: Any) -> None:
        """Set an entry of a mapping; `undo` puts back what stood there, or takes it out."""
        self.items(mapping, {key: new})

    def items(self, mapping: MutableMapping, new: Mapping) -> None:
        """Set entries of a mapping, in one change."""
        self._changes.append(_Entries(mapping, {key: mapping.get(key, ABSENT) for key in new}, new))
        mapping.update(new)

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
