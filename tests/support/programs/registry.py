"""The acts of which programs are made."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from torch import nn

from tests.support.programs.side import Side

Run = Callable[[Side, Random], Any]


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

    def do(self, side: Side, seed: int) -> None:
        """Do it to a side, with what the seed chooses."""
        if side.has_kernels or not self.is_ours:
            found = self.run(side, Random(seed))
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
