"""Processes with a software device each, in one process group: what a test wants to run on all of them.

They are started once and serve many tests, forked from one process that has imported what they need, which takes
seconds. One that fails, dies or hangs ends them all; the next test gets new ones.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

SECONDS = 90  # a test that takes longer hangs
GRACE = 3  # what the others get when one has failed
BACKENDS = "hccl", "cpu:gloo,npu:hccl"
DEVICES = 8  # of the machine, however many processes there are
PRELOADED = "tests.distributed.preloaded"


class FailedOnRanksError(AssertionError):
    """A function failed on one or more of the processes. The message holds their tracebacks."""


class Processes:
    """``size`` processes, ranks 0 to size - 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[tuple[multiprocessing.Process, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        self._group = 0
        self._backend = ""

    def run(
        self, function: Callable[..., Any], *args: Any, backend: str = "hccl", seconds: float = SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Call an importable function on every process, in a process group that exists, and return what each returned.

        Tensors must be on the CPU. Where it raises, its process ends, or time is up, that is a `FailedOnRanksError`.
        """
        if not self._workers:
            self._start()
        if backend != self._backend:
            self._group, self._backend = self._group + 1, backend
        store = Path(self._folder.name) / f"store-{self._group}"
        for _, connection in self._workers:
            connection.send((function, args, kwargs, backend, str(store)))
        return self._results(time.monotonic() + seconds)

    def stop(self) -> None:
        """End the processes."""
        for process, connection in self._workers:
            connection.close()  # a worker that waits for work ends by itself
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()
        self._workers.clear()
        self._backend = ""

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        environment = _environment()
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)  # the process that they are forked from reads it while it imports
        try:
            for rank in range(self.size):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, rank, self.size), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def _results(self, deadline: float) -> list[Any]:
        ranks = {connection: rank for rank, (_, connection) in enumerate(self._workers)}
        waiting = set(ranks)
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while waiting and (ready := wait(list(waiting), max(0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                waiting.discard(connection)
                rank = ranks[connection]
                try:
                    results[rank], failure = connection.recv()
                except EOFError:
                    failure = "its process ended"
                if failure is not None:
                    failures[rank] = failure
                    deadline = min(deadline, time.monotonic() + GRACE)
        failures |= {ranks[connection]: "not done in time" for connection in waiting}
        if failures:
            for process, _ in self._workers:
                process.kill()
            self.stop()
            raise FailedOnRanksError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [results[rank] for rank in range(self.size)]


def _environment() -> dict[str, str]:
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONWARNINGS": "ignore",
        "SOFTNPU_DEVICES": str(DEVICES),  # torch_npu asks for it while it is imported
    }


def _serve(connection: Connection, rank: int, size: int) -> None:
    """A worker's main function: calls what it is sent until the connection closes."""
    count = str(size)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    import softnpu  # noqa: F401, I001  before torch
    import torch

    torch.set_num_threads(1)
    torch.npu.set_device(rank)
    backend = None
    while True:
        try:
            message = connection.recv()
        except EOFError:
            break
        except Exception:  # the function's module could not be imported here
            connection.send((None, traceback.format_exc()))
            continue
        function, args, kwargs, wanted, store = message
        try:
            if wanted != backend:
                backend = _join(wanted, store, rank, size)
            answer = function(*args, **kwargs), None
        except Exception:
            answer = None, traceback.format_exc()
        connection.send(answer)
    # no collective at the end: another rank may be gone
    os._exit(0)


def _join(backend: str, store: str, rank: int, size: int) -> str:
    from datetime import timedelta

    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    timeout = timedelta(seconds=SECONDS)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    return backend
