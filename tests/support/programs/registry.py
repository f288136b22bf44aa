"""The acts of which programs are made."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from tests.support.programs.side import Side

Run = Callable[[Side, Random], None]


class Act(NamedTuple):
    """One thing that a user does to a model.

    Attributes:
        run: does it to one side; whatever there is to choose comes from the generator, which is the same for both.
        applies: whether a side is in a state where it makes sense.
        computes: whether weights come out of computing on the device, and then agree up to rounding only.
    """

    run: Run
    applies: Callable[[Side], bool]
    computes: bool

    @property
    def name(self) -> str:
        """What the act is called in a program."""
        return self.run.__name__


ACTS: dict[str, Act] = {}


def always(side: Side) -> bool:
    """Tell that an act makes sense whatever has happened."""
    return True


def act(applies: Callable[[Side], bool] = always, *, computes: bool = False) -> Callable[[Run], Run]:
    """Enter a function among the acts."""

    def enter(run: Run) -> Run:
        assert run.__name__ not in ACTS
        ACTS[run.__name__] = Act(run, applies, computes)
        return run

    return enter
