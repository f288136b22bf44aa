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
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).resolve().parents[2]
TORCH = ("softnpu", "torch._dynamo", "scipy.optimize", "pandas", "pyarrow", "torchao")
TRANSFORMERS = (
    "kernels_ext_npu.cli",
    "kernels_ext_npu.lifecycle.register",
    "transformers.generation.utils",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
SECONDS = 300  # until a process is killed


class Forks:
    """The two processes that others are forked from, which import when they are asked; they end with this one."""

    def __init__(self) -> None:
        self._errors = os.memfd_create("errors")
        self._process: subprocess.Popen | None = None

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
        if self._process is None:
            self._start(inherited)
        asked = self._torch_fork if given else self._transformers_fork
        request = {"code": code, "arguments": arguments, "directory": str(directory or Path.cwd())}
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            request |= {"streams": [out.name, err.name], "environment": inherited | given}
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps(request), file=asked, flush=True)
            if not (status := asked.readline()):
                raise RuntimeError(os.pread(self._errors, os.fstat(self._errors).st_size, 0).decode())
            end = os.waitstatus_to_exitcode(int(status))
            return subprocess.CompletedProcess(arguments, end, out.read(), err.read())

    def stop(self) -> None:
        """End them."""
        os.close(self._errors)
        if self._process is not None:
            self._torch_fork.close()
            self._transformers_fork.close()
            self._process.wait()

    def _start(self, environment: dict[str, str]) -> None:
        ours, theirs = zip(socket.socketpair(), socket.socketpair())
        self._torch_fork, self._transformers_fork = (each.makefile("rw") for each in ours)
        files = [each.fileno() for each in theirs]
        command = [sys.executable, "-m", __name__, *map(str, files)]
        errors = {"stdin": subprocess.DEVNULL, "stdout": self._errors, "stderr": self._errors}
        self._process = subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=files, **errors)
        for each in (*ours, *theirs):
            each.close()


# ---- in the other processes -----------------------------------------------------------------------------------------
def serve(asked: TextIO) -> dict[str, Any]:
    """Fork a process for each request, and answer with how it ended; returns in it, with the request."""
    gc.collect()
    gc.freeze()  # the collector of a process neither visits nor copies what all of them share
    while line := asked.readline():
        if not (process := os.fork()):
            asked.close()
            return json.loads(line)
        print(os.waitpid(process, 0)[1], file=asked, flush=True)
    os._exit(0)  # the tests have ended


def become(request: dict[str, Any], own: dict[str, str]) -> None:
    """Run what is asked for, in an environment with the variables that imports have set."""
    signal.alarm(SECONDS)
    for stream, path in enumerate((os.devnull, *request["streams"])):
        file = os.open(path, os.O_RDWR)
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
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    for module in TORCH:
        importlib.import_module(module)
    is_behind = not os.fork()
    sockets.pop(not is_behind).close()
    if is_behind and sockets[0].recv(1, socket.MSG_PEEK):  # when it is asked for the first time
        for module in TRANSFORMERS:
            importlib.import_module(module)
    request = serve(sockets.pop().makefile("rw"))
    status: Any = 0
    try:
        become(request, {name: value for name, value in os.environ.items() if before.get(name) != value})
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
