"""The machine of hypothesis that makes programs: one rule an act."""

import tempfile
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.support.programs.program import Program
from tests.support.programs.registry import ACTS
from tests.support.programs.variants import VARIANTS

SEEDS = st.integers(0, 2**16)


class _Base(RuleBasedStateMachine):
    """Starts with a model, with or without kernels, and ends with a process as it was."""

    program: Program | None = None
    possible: AbstractSet[str] = frozenset()

    @initialize(variant=st.sampled_from(sorted(VARIANTS)), kernels=st.sampled_from([True, True, False]))
    def start(self, variant: str, kernels: bool) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.program = Program(variant, Path(self.folder.name), kernels)
        self.possible = set(self.program.possible())

    @precondition(lambda self: self.program is not None and self.program.is_over)
    @rule()
    def stop(self) -> None:
        """Do nothing more: the sides have parted, as they may."""

    def teardown(self) -> None:
        if self.program is not None:
            self.program.close()
            self.folder.cleanup()


def _rule(name: str) -> Any:
    def run(self: _Base, seed: int) -> None:
        assert self.program is not None
        self.program.do(name, seed)
        self.possible = set() if self.program.is_over else set(self.program.possible())

    run.__name__ = name
    return precondition(lambda self: name in self.possible)(rule(seed=SEEDS)(run))


Programs = type("Programs", (_Base,), {name: _rule(name) for name in ACTS})
