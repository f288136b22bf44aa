"""Works made of other works."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork
from torch.distributed import Work


def then(work: Work, targets: Iterable[Tensor], results: Iterable[Tensor]) -> Work:
    """``work``, and when it is waited for, the results that are not their targets themselves copied to them."""
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
    """Several works as one."""
    return PythonCallbackWork(lambda timeout: all(work.wait(timeout) for work in works))


class Works(Work):
    """Several works as one, which can be asked whether they are done. For callers in Python only."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self.works = works

    def wait(self, *timeout: Any) -> bool:
        """Until the last of them is done."""
        return all(work.wait(*timeout) for work in self.works)

    def is_completed(self) -> bool:
        """Whether all of them are."""
        return all(work.is_completed() for work in self.works)
