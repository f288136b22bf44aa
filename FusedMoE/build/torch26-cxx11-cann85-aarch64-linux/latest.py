"""What was computed last and may be wanted soon."""

from __future__ import annotations

import weakref

from torch import Tensor


class Latest:
    """What a forward computed, until another one takes its place or a backward takes it away."""

    _current: weakref.ref[Latest] | None = None

    def __init__(self, computed: tuple[Tensor | None, ...]) -> None:
        before = Latest._current and Latest._current()
        if before is not None:
            before.take()
        Latest._current = weakref.ref(self)
        self._computed = computed

    def take(self) -> tuple[Tensor | None, ...]:
        """As many times None where it is gone; then it has to be computed again."""
        computed, self._computed = self._computed, (None,) * len(self._computed)
        return computed
