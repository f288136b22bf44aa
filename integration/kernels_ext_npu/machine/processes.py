"""Calls a function in a process of its own, because it may crash or hang, and hears what it says meanwhile.

Whatever happens to that process is a result. It says a line of JSON each time that it has something to say; what
libraries print goes elsewhere.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import TracebackType
from typing import Any

PATIENCE = 2.0  # seconds after a kill: a process that waits for a broken driver cannot be ended, and is left behind

_running: set[Child] = set()


class Child:
    """A process that calls ``module.function(**arguments)``; it is ended, with all that it started, with the context.

    Args:
        call: the module and the function in it, such as "kernels_ext_npu.selftest.worker:main".
        arguments: what the function is given, as Python writes it.
        environment: variables in place of those of this process.

    Raises:
        OSError: no process can be started, for want of memory, say.
    """

    def __init__(self, call: str, arguments: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from kernels_ext_npu.machine import processes; processes.serve({call!r}, {arguments!r})"
        )
        self._printed = tempfile.TemporaryFile()  # noqa: SIM115  closed with the context
        self._process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", code],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            start_new_session=True,  # so that what it starts is stopped with it
        )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def __enter__(self) -> Child:
        _running.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        _running.discard(self)
        self.kill()
        self._printed.close()

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """Return what it says next, or None if it has ended; raise queue.Empty after so many seconds of nothing."""
        while (line := self._lines.get(timeout=max(seconds, 0.0))) is not None:
            with suppress(ValueError):  # a line that a crash cut short
                return json.loads(line)
        return None

    def kill(self) -> None:
        """End it now, and wait for its end, but not for long."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)

    def death(self) -> str:
        """Say how it ended: by which signal, or by itself."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(PATIENCE)
        code = self._process.poll()
        if code is None or code >= 0:
            return f"ended by itself with code {code}"
        known = {number.value: number.name for number in signal.Signals}
        return f"died of {known.get(-code, f'signal {-code}')}"

    def printed(self) -> str:
        """Return the end of what it printed."""
        self._printed.seek(0)
        return "\n".join(self._printed.read().decode(errors="replace").strip().splitlines()[-20:])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


@contextmanager
def ended_at_an_interrupt() -> Iterator[None]:
    """End the processes of other threads where this one is interrupted: a pool would wait for them."""

    def interrupt(number: int, frame: Any) -> None:
        for child in list(_running):
            child.kill()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ---- in the process --------------------------------------------------------------------------------------------------
_channel = -1


def serve(call: str, arguments: dict[str, Any]) -> None:
    """Call the function, say that it ended or which errors it raised, outermost first, and end the process."""
    global _channel
    _channel = os.dup(1)
    os.dup2(2, 1)  # what libraries print to standard output is nothing that was said
    module, _, function = call.partition(":")
    try:
        getattr(import_module(module), function)(**arguments)
        say(ended=True)
    except BaseException as error:
        traceback.print_exc()
        say(errors=_chain(error))
    sys.stderr.flush()
    os._exit(0)  # what happens in the exit handlers of torch_npu is not what was asked


def say(**entry: Any) -> None:
    """Say something to the process that started this one: it is heard whatever happens later."""
    os.write(_channel, json.dumps(entry, default=str).encode() + b"\n")


def _chain(error: BaseException) -> list[str]:
    errors: list[str] = []
    link: BaseException | None = error
    while link is not None and len(errors) < 10:
        text = str(link).strip()
        errors.append(f"{type(link).__name__}: {text}" if text else type(link).__name__)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return errors
