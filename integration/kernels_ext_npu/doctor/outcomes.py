"""Runs a probe in a process of its own, and puts together what it found out and how it ended."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kernels_ext_npu.machine.processes import Child

START = "starting Python"


@dataclass
class Outcome:
    """What a probe found out, and how it ended.

    Attributes:
        facts: what it found out; ``passed`` are the steps that it completed.
        step: what it was doing at last.
        failure: how it failed in one line, None if it did not.
        errors: the exception that ended it and those that caused it, outermost first, as "Type: message".
        hung: whether it was stopped because its time was over.
        output: the end of what it printed.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    step: str = START
    failure: str | None = None
    errors: tuple[str, ...] = ()
    hung: bool = False
    output: str = ""

    @property
    def cause(self) -> str | None:
        """The failure in a line: what caused it, without what was made of it."""
        return self.errors[-1].splitlines()[0] if self.errors else self.failure

    def passed(self, step: str) -> bool:
        """Tell whether a step was completed."""
        return self.failure is None or step in self.facts.get("passed", ())


def run(
    probe: Callable[..., None], limit: float, environment: dict[str, str] | None = None, **arguments: Any
) -> Outcome:
    """Run a function of `kernels_ext_npu.doctor.probes`, for at most `limit` seconds.

    Args:
        environment: variables in place of those of this process; they are kept by default.
        arguments: what the function is given.
    """
    outcome, end = Outcome({"passed": []}), time.monotonic() + limit
    try:
        with Child(f"{probe.__module__}:{probe.__name__}", arguments, environment) as child:
            try:
                while (said := child.hear(end - time.monotonic())) is not None and "ended" not in said:
                    _note(outcome, said)
                if said is None and not outcome.errors:
                    signal, code = child.death()
                    how = f"died of {signal}" if signal else f"ended by itself with code {code}"
                    outcome.failure = f"{outcome.step}: the process {how}"
            except queue.Empty:
                outcome.hung, outcome.failure = True, f"{outcome.step}: no end after {limit:.0f} s"
                child.kill()
            outcome.output = child.printed()
    except OSError as error:  # no memory, no more processes
        outcome.failure = f"Python could not be started: {error}"
    return outcome


def _note(outcome: Outcome, said: dict[str, Any]) -> None:
    if "step" in said:
        if outcome.step != START:
            outcome.facts["passed"].append(outcome.step)
        outcome.step = said["step"]
    elif "errors" in said:
        outcome.errors = tuple(said["errors"])
        outcome.failure = f"{outcome.step}: {outcome.errors[0]}"
    else:
        outcome.facts |= said
