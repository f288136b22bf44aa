"""The acts of which programs are made."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from torch import Tensor, nn

from tests.support.programs.side import Side

Run = Callable[[Side, Any], Any]  # a Random, or Words


class Words:
    """Choose what words say, in their order, in the place of a generator.

    A part is said by its path or its class, a value by itself, and chance by yes or no.
    """

    def __init__(self, words: Sequence[Any]) -> None:
        self._words = iter(words)

    def choice(self, options: Sequence[Any]) -> Any:
        word = next(self._words)
        return next(one for one in options if word in map(_name, one if isinstance(one, tuple) else (one,)))

    def random(self) -> float:
        return 0.0 if next(self._words) else 1.0

    def sample(self, options: Sequence[Any], count: int) -> list[Any]:
        return [self.choice(options) for _ in range(count)]


def _name(one: Any) -> Any:
    return type(one).__name__ if isinstance(one, nn.Module | Tensor) else getattr(one, "__name__", one)


class Act(NamedTuple):
    """One thing that a user does to a model.

    Attributes:
        run: does it to one side; whatever there is to choose comes from the generator, which is the same for both. A
            module that it returns is the model from there on.
        applies: whether a side is in a state where it makes sense.
        computes: whether weights come out of computing on the device, and then agree up to rounding only.
        is_ours: whether it is about kernels, and nothing to a side without.
    """

    run: Run
    applies: Callable[[Side], object]
    computes: bool
    is_ours: bool

    def do(self, side: Side, seed: int, *words: Any) -> None:
        """Do it to a side, with what the words choose if there are some, or what the seed does."""
        if side.has_kernels or not self.is_ours:
            found = self.run(side, Words(words) if words else Random(seed))
            if isinstance(found, nn.Module):
                side.model = found


ACTS: dict[str, Act] = {}


def acts(
    applies: Callable[[Side], object] = bool, *, computes: bool = False, is_ours: bool = False, **runs: Run
) -> None:
    """Enter acts by their names; without a condition they make sense whatever has happened, since a side is true."""
    assert not runs.keys() & ACTS.keys()
    ACTS.update((name, Act(run, applies, computes, is_ours)) for name, run in runs.items())


def act(applies: Callable[[Side], object] = bool, **options: bool) -> Callable[[Run], Run]:
    """Enter a function among the acts."""

    def enter(run: Run) -> Run:
        acts(applies, **options, **{run.__name__: run})
        return run

    return enter
