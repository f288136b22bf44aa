"""Runs a probe: a piece of a check that may raise, crash or hang, and therefore has a process of its own.

Whatever happens to that process is a result. What it found out before is kept.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

# after a kill: a process that waits for a broken driver cannot be ended, and is left behind
PATIENCE = 2.0

_running: set[subprocess.Popen] = set()


@dataclass(frozen=True)
class Outcome:
    """What a probe found out, and how it ended.

    Attributes:
        facts: what it found out.
        step: what it was doing at last.
        failure: how it failed in one line, None if it did not.
        errors: the exception that ended it and those that caused it, outermost first, as "Type: message".
        hung: whether it was stopped because its time was over.
        output: the end of what it printed.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    step: str = "starting Python"
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


def run(probe: str, limit: float, environment: dict[str, str] | None = None, **arguments: Any) -> Outcome:
    """Run a probe of `kernels_ext_npu.doctor.probe`, for at most `limit` seconds.

    Args:
        probe: its module below `kernels_ext_npu.doctor`.
        environment: variables in place of those of this process; they are kept by default.
        arguments: the arguments of its function `probe`, as JSON has them.
    """
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"from kernels_ext_npu.doctor import probe; probe.main({probe!r}, {arguments!r})"
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", code],
            env=os.environ if environment is None else environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that what it starts is stopped with it
        )
    except OSError as error:  # no memory, no more processes
        return Outcome(failure=f"Python could not be started: {error}")
    hung = False
    _running.add(process)
    try:
        notes, output = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired as late:
        hung, notes, output = True, late.stdout or b"", late.stderr or b""
        _kill(process)
        with suppress(subprocess.TimeoutExpired):
            notes, output = process.communicate(timeout=PATIENCE)
    except BaseException:
        _kill(process)
        raise
    finally:
        _running.discard(process)
    return _outcome(notes, output.decode(errors="replace"), process.poll(), limit if hung else None)


@contextmanager
def stopped_at_an_interrupt() -> Iterator[None]:
    """End the probes of other threads where this one is interrupted: a pool would wait for them."""

    def interrupt(number: int, frame: Any) -> None:
        for process in list(_running):
            _kill(process)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _kill(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except OSError:
        process.kill()


def _outcome(notes: bytes, output: str, code: int | None, limit: float | None) -> Outcome:
    facts: dict[str, Any] = {"passed": []}
    step, errors, ended = "starting Python", (), False
    for line in notes.splitlines():
        try:
            note = json.loads(line)
        except ValueError:  # cut short by a crash
            continue
        if "step" in note:
            if step != "starting Python":
                facts["passed"].append(step)
            step = note["step"]
        errors = tuple(note.get("errors", errors))
        ended = ended or "ended" in note
        facts |= note.get("facts", {})
    failure = None
    if limit is not None:
        failure = f"{step}: no end after {limit:.0f} s"
    elif errors:
        failure = f"{step}: {errors[0]}"
    elif not ended:
        failure = f"{step}: {_death(code)}"
    tail = "\n".join(output.strip().splitlines()[-20:])
    return Outcome(facts, step, failure, errors, limit is not None, tail)


def _death(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"the process died of {signal.Signals(-code).name}"
        except ValueError:
            return f"the process died of signal {-code}"
    return f"the process ended by itself with code {code}"
