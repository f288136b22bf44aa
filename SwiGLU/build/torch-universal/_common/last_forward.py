"""What a forward computed last. Its gradient comes first, and may want it."""

from __future__ import annotations

import weakref

from torch import Tensor


class Latest:
    """Holds what a forward computed, until another forward's takes its place or a backward takes it away."""

    _current: weakref.ref[Latest] | None = None

    def __init__(self, computed: tuple[Tensor | None, ...]) -> None:
        before = Latest._current and Latest._current()
        if before is not None:
            before.take()
        Latest._current = weakref.ref(self)
        self._computed = computed

    def take(self) -> tuple[Tensor | None, ...]:
        """Hand over what was computed, and forget it. An empty tuple says that it is gone: compute it again."""
        computed, self._computed = self._computed, ()
        return computed
