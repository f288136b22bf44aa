"""Runs a selftest: in processes of its own, of which each goes on behind what ended the one before."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any

from kernels_ext_npu.doctor.probing import PATIENCE

START = 180.0  # seconds for imports and the first call of a device, on slow disks
LIMIT = 60.0  # seconds for a piece: those of operators take milliseconds, those of models some seconds
MOST_ENDS = 25  # of processes; a device that ends each of them will end the next

Tell = Callable[[int, int, str], None]


class CannotTestError(Exception):
    """Nothing could be tested. The message says why."""


@dataclass
class Outcome:
    """What a selftest found.

    Attributes:
        machine: what it ran on.
        quick: whether only a part was asked for.
        only: parts of the ids that were asked for.
        rows: what was found of each piece, by id; every one has ``agrees``.
        ids: all that was to do.
    """

    quick: bool
    only: tuple[str, ...] = ()
    machine: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    ids: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        """Whether everything was done, and gave what it has to."""
        return bool(self.ids) and all(self.rows.get(identity, {}).get("agrees", False) for identity in self.ids)


def run(
    source: str = "bundled",
    quick: bool = False,
    only: Sequence[str] = (),
    limit: float = LIMIT,
    tell: Tell = lambda *_: None,
) -> Outcome:
    """Test every kernel, and return what was found.

    Args:
        source: where the kernels come from, as register() takes it.
        quick: whether only a part is wanted.
        only: parts of the ids that are wanted; all of them without any.
        limit: seconds after which a piece counts as hanging, and its process is ended.
        tell: called with how much is done, of how much, and what begins.

    Raises:
        CannotTestError: no process came as far as the first piece.
    """
    outcome = Outcome(quick, tuple(only))
    for _ in range(MOST_ENDS):
        if _go_on(outcome, source, limit, tell):
            break
    if not outcome.ids:
        raise CannotTestError(f"there is no test whose name has {' or '.join(only)} in it")
    for identity in outcome.ids:
        outcome.rows.setdefault(identity, _failure("not run: too many processes ended before it"))
    return outcome


def _go_on(outcome: Outcome, source: str, limit: float, tell: Tell) -> bool:
    """Start a process for what is left, follow it to its end, and tell whether all is done."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from kernels_ext_npu.selftest import worker; "
        f"worker.main({source!r}, {outcome.quick!r}, {list(outcome.only)!r}, {list(outcome.rows)!r})"
    )
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
            start_new_session=True,  # so that what it starts is stopped with it
        )
        try:
            return _follow(process, outcome, limit, tell, said)
        finally:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):  # one that waits for a broken driver is left behind
                process.wait(PATIENCE)


def _follow(process: subprocess.Popen, outcome: Outcome, limit: float, tell: Tell, said: IO[bytes]) -> bool:
    lines: queue.Queue[bytes | None] = queue.Queue()
    threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
    running: str | None = None
    while True:
        try:
            line = lines.get(timeout=limit if running else START)
        except queue.Empty:
            if running is None:
                raise CannotTestError(f"Python, torch and the device did not start within {START:.0f} s") from None
            outcome.rows[running] = _failure(f"did not end within {limit:.0f} s")
            return False
        if line is None:
            return _ended(process, outcome, running, said)
        try:
            entry = json.loads(line)
        except ValueError:  # cut short by a crash
            continue
        if "failed" in entry:
            raise CannotTestError(entry["failed"])
        outcome.machine = entry.get("machine", outcome.machine)
        outcome.ids = entry.get("ids", outcome.ids)
        if "begins" in entry:
            running = entry["begins"]
            tell(len(outcome.rows), len(outcome.ids), entry["begins"])
        elif "ends" in entry:
            identity, running = entry.pop("ends"), None
            outcome.rows[identity] = _failure(entry["error"]) if "error" in entry else entry
        elif "ended" in entry:
            return True


def _ended(process: subprocess.Popen, outcome: Outcome, running: str | None, said: IO[bytes]) -> bool:
    """Say what ended a process: of a signal its name, and the end of what it printed."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(PATIENCE)
    code = process.poll()
    how = f"ended with {code}"
    if code is not None and code < 0:
        with suppress(ValueError):
            how = f"crashed: {signal.Signals(-code).name}"
    if running is not None:
        outcome.rows[running] = _failure(f"its process {how}")
        return False
    if not outcome.ids:
        said.seek(0)
        last = said.read().decode(errors="replace").strip().splitlines()[-1:]
        raise CannotTestError(f"the process {how} before the first test: {''.join(last)}")
    return False


def _read(stream: IO[bytes], lines: queue.Queue[bytes | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _failure(error: str) -> dict[str, Any]:
    return {"agrees": False, "error": error}
