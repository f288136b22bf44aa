"""Processes with a software device each, in one process group: what a test wants to run on all of them.

They are started once and serve many tests, forked from one process that has imported what they need, which takes
seconds. One that fails, dies or hangs ends them all; the next test gets new ones.
"""

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from typing import Any

import pytest

SECONDS = 90  # a test that takes longer hangs
GRACE = 3  # what the others get when one has failed
BACKENDS = "hccl", "cpu:gloo,npu:hccl"
DEVICES = 8  # of the machine, however many processes there are
PRELOADED = "tests.distributed.preloaded"
STORE = "TESTS_DISTRIBUTED_STORE"  # in the processes: that of the process group which they have


class FailedOnRanksError(AssertionError):
    """A function failed on one or more of the processes. The message holds their tracebacks."""


class Processes:
    """``size`` processes, ranks 0 to size - 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[ProcessPoolExecutor] = []
        self._pids: list[int] = []
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
        store, call = f"{self._folder.name}/store-{self._group}", pickle.dumps((function, args, kwargs))
        results = [worker.submit(_call, backend, store, call) for worker in self._workers]
        wait(results, seconds, FIRST_EXCEPTION)
        wait(results, GRACE)
        if failures := {rank: failure for rank, result in enumerate(results) if (failure := _failure(result))}:
            self.close()
            raise FailedOnRanksError("\n".join(f"rank {rank}: {failure}" for rank, failure in failures.items()))
        return [result.result() for result in results]

    def close(self) -> None:
        """End the processes: no collective at the end, another rank may be gone."""
        for process in multiprocessing.active_children():
            if process.pid in self._pids:
                process.kill()
        for worker in self._workers:
            worker.shutdown()
        self._workers.clear()
        self._backend = ""

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([PRELOADED])
        environment = {
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONWARNINGS": "ignore",
            "SOFTNPU_DEVICES": str(DEVICES),  # torch_npu asks for it while it is imported
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():  # which the process that they are forked from reads
                patch.setenv(name, value)
            self._workers = [ProcessPoolExecutor(1, context, _begin, (rank, self.size)) for rank in range(self.size)]
            self._pids = [worker.submit(os.getpid).result() for worker in self._workers]


def _failure(result: Future) -> str | None:
    if not result.done():
        return "not done in time"
    error = result.exception()
    return "its process ended" if isinstance(error, BrokenProcessPool) else error and str(error.__cause__)


def _begin(rank: int, size: int) -> None:
    """Begin as a rank, before the process is told what to call."""
    threading.Thread(target=_end_with_the_tests, daemon=True).start()
    count = str(size)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    import softnpu  # noqa: F401, I001  before torch
    import torch

    torch.set_num_threads(1)
    torch.npu.set_device(rank)


def _end_with_the_tests() -> None:
    """Let nothing be left of a run that was killed."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _call(backend: str, store: str, call: bytes) -> Any:
    """Call what was sent, in the process group of a store, which is made when it is first asked for."""
    import torch.distributed as dist

    if store != os.environ.get(STORE):
        if dist.is_initialized():
            dist.destroy_process_group()
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        timeout = timedelta(seconds=SECONDS)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
        os.environ[STORE] = store
    function, args, kwargs = pickle.loads(call)
    return function(*args, **kwargs)
