"""Processes that begin where others are after seconds: forked from one that has imported torch, or transformers, too.

Each has its code, arguments, environment, folder, streams and end, as a fresh one. What a library reads from the
environment while it is imported was read before: the process of torch has imported nothing that reads ``HF_HOME`` and
its like, or how many devices there are, and is taken where variables are given.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TORCH = ["softnpu", "torch._dynamo", "scipy.optimize", "pandas", "pyarrow", "torchao"]
TRANSFORMERS = [
    "kernels_ext_npu.cli",
    "kernels_ext_npu.lifecycle.register",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
]
SECONDS = 300  # until a process is killed
LIMIT = 1 << 20  # of a request, in bytes
FAMILY = socket.AF_UNIX, socket.SOCK_SEQPACKET


class Forks:
    """The two processes that others are forked from, each started when it is asked for; they end with this one."""

    def __init__(self) -> None:
        self._of_torch: bytes | None = None
        self._of_transformers: bytes | None = None
        self._errors = os.memfd_create("errors")

    def run(
        self,
        code: str | None,
        *arguments: str,
        directory: Path | None,
        inherited: dict[str, str],
        given: dict[str, str],
    ) -> subprocess.CompletedProcess[str]:
        """Run code, or what ``arguments`` name, as an interpreter does, with inherited and given variables.

        A RuntimeError has what those that it is forked from have printed.
        """
        if self._of_torch is None:
            self._of_torch = self._serving(partial(self._start, inherited))
        if not given and self._of_transformers is None:
            self._of_transformers = self._serving(self._start_behind)
        address = self._of_torch if given else self._of_transformers
        request = {"code": code, "arguments": arguments, "directory": str(directory or Path.cwd())}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            files = [out.fileno(), err.fileno()]
            with _sent(address, request | {"environment": inherited | given}, files) as connection:
                status = connection.recv(16)
            if not status:
                raise RuntimeError(_content(self._errors))
            end = os.waitstatus_to_exitcode(int(status))
            return subprocess.CompletedProcess(arguments, end, *map(_content, files))

    def stop(self) -> None:
        """End them."""
        os.close(self._errors)
        if self._of_torch is not None:
            self._process.communicate()

    def _serving(self, start: Callable[[socket.socket], None]) -> bytes:
        with socket.socket(*FAMILY) as listener:
            listener.bind("")
            listener.listen()
            start(listener)
            return listener.getsockname()

    def _start(self, environment: dict[str, str], listener: socket.socket) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), *TORCH],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=self._errors,
            stderr=self._errors,
            pass_fds=[listener.fileno()],
        )

    def _start_behind(self, listener: socket.socket) -> None:
        _sent(self._of_torch, {"modules": TRANSFORMERS}, [listener.fileno()]).close()


def _content(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode()


def _sent(address: bytes | None, request: dict[str, Any], files: list[int]) -> socket.socket:
    connection = socket.socket(*FAMILY)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LIMIT)
    connection.connect(address)
    socket.send_fds(connection, [json.dumps(request).encode()], files)
    return connection


# ---- in the other processes -----------------------------------------------------------------------------------------
def serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a process for each request; returns in it, with the request and its files."""
    gc.collect()
    gc.freeze()  # the collector of a process neither visits nor copies what all of them share
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        message, files, *_ = socket.recv_fds(connection, LIMIT, 2)
        if process := os.fork():
            _, status = os.waitpid(process, 0)
            connection.send(str(status).encode())
            os._exit(0)
        connection.close()
        return json.loads(message), files
    with contextlib.suppress(ChildProcessError):  # the tests have ended
        while True:
            os.wait()
    os._exit(0)


def become(request: dict[str, Any], files: list[int], own: dict[str, str]) -> None:
    """Run what is asked for, in an environment with the variables that imports have set."""
    signal.alarm(SECONDS)
    for stream, file in enumerate([os.open(os.devnull, os.O_RDONLY), *files]):
        os.dup2(file, stream)
        os.close(file)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"] | own)
    code, sys.argv = request["code"], request["arguments"]
    paths = request["environment"]["PYTHONPATH"].split(os.pathsep)
    sys.modules["__main__"] = types.ModuleType("__main__")
    for name in ("tests", "tests.support"):  # of which this is imported, and a copy may have others
        del sys.modules[name]
    if code is not None:
        sys.argv, sys.path[:1] = ["-c", *sys.argv], ["", *paths]
        exec(compile(code, "<string>", "exec"), sys.modules["__main__"].__dict__)
    elif sys.argv[0] == "-m":
        sys.argv, sys.path[:1] = sys.argv[1:], [str(Path.cwd()), *paths]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[:1] = [str(Path(sys.argv[0]).resolve().parent), *paths]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    before = dict(os.environ)
    request, files = {"modules": sys.argv[2:]}, [int(sys.argv[1])]
    while "modules" in request:
        for module in request["modules"]:
            importlib.import_module(module)
        request, files = serve(socket.socket(fileno=files[0]))
    status: Any = 0
    try:
        become(request, files, {name: value for name, value in os.environ.items() if before.get(name) != value})
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status)  # to take all modules apart would take half a second
