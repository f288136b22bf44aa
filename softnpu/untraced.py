"""Keeps torch.compile out of the kernels of the software device, which stand for what is compiled already.

Where a graph breaks, Dynamo looks at every Python function that runs until the next one: also at a kernel that an
operator of torch calls.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

Kernel = TypeVar("Kernel", bound=Callable)


def untraced(kernel: Kernel) -> Kernel:
    """The kernel itself: it, and what it calls, is not looked at. Without importing Dynamo, which takes a second."""
    assert isinstance(kernel, FunctionType)
    set_code_exec_strategy(kernel.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    return kernel
