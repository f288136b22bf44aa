"""Keep torch.compile out of the kernels of the software device, which stand for what is compiled already.

Where a graph breaks, Dynamo looks at every Python function that runs until the next one: also at a kernel that an
operator of torch calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

# of the C library, without importing Dynamo, which takes a second
from torch._C._dynamo import eval_frame


def _skipped(kernel: Callable) -> Callable:
    """Let Dynamo skip the kernel and all that it calls, and return the kernel itself."""
    assert isinstance(kernel, FunctionType)
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(kernel.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return kernel


def _with_dynamo_away(kernel: Callable) -> Callable:
    """Switch Dynamo off around the kernel: before 2.7 torch can skip a function, but not what it calls."""

    @functools.wraps(kernel)
    def alone(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return kernel(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    return alone


untraced = _skipped if hasattr(eval_frame, "set_code_exec_strategy") else _with_dynamo_away
