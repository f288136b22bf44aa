"""Combine the handles of asynchronous collectives, torch's ``Work``, into one."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork
from torch.distributed import Work


def then(work: Work, targets: Iterable[Tensor], results: Iterable[Tensor]) -> Work:
    """Return ``work`` with an end: when it is waited for, results that are not their targets are copied there."""
    copies = [(target, result) for target, result in zip(targets, results) if target is not result]
    if not copies:
        return work
    lock = threading.Lock()

    def wait(timeout: Any) -> bool:
        work.wait(timeout)
        with lock:
            while copies:
                target, result = copies.pop()
                target.copy_(result.view(target.shape))
        return True

    return PythonCallbackWork(wait)


def joined(works: list[Work]) -> Work:
    """Make one work of several, which waits for all of them."""
    return PythonCallbackWork(lambda timeout: all(work.wait(timeout) for work in works))


class Works(Work):
    """Make one work of several that can be asked whether they are done. For callers in Python only."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self.works = works

    def wait(self, *timeout: Any) -> bool:
        """Wait until the last of them is done."""
        return all(work.wait(*timeout) for work in self.works)

    def is_completed(self) -> bool:
        """Tell whether all of them are done."""
        return all(work.is_completed() for work in self.works)
