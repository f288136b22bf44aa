"""What a computation asks of the host, counted: the same figures on any machine, however busy it is.

The kernels of the software device stand for what a card does, and what they do is left out; so is what the garbage
collector does. The backward runs in the thread that asks for it: Python 3.11 and before cannot watch the engine's.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch.autograd.profiler import profile
from torch.overrides import TorchFunctionMode

import softnpu
from softnpu import aten_kernels as aten
from softnpu.formulas import FORMULAS

_DEVICE = str(Path(softnpu.__file__).parent)
_NODE = "autograd::engine::evaluate_function: "


class HostCalls(NamedTuple):
    """Calls by the language that they are answered in.

    Attributes:
        python: Python functions that are entered, generators whenever they go on.
        c: functions and methods of C that Python calls, and attributes of tensors that it reads.
        torch: operators that go through torch's dispatcher, whoever calls them, views and allocations among them; and
            nodes of autograd that a backward runs.
    """

    python: int
    c: int
    torch: int

    def __sub__(self, other: HostCalls) -> HostCalls:
        return HostCalls(*(a - b for a, b in zip(self, other)))


def host_calls(call: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> HostCalls:
    """Count what a call asks of the host, once it does the same every time.

    Args:
        call: runs five times, twice to fill its caches. A function of Python counts itself.
        prepare: runs before each of them, and is not counted.

    Example:
        >>> host_calls(lambda: torch.ones(3, device="npu").numel())
        HostCalls(python=1, c=2, torch=2)
    """
    with _no_collection(), torch.autograd.set_multithreading_enabled(False):
        for _ in range(2):
            prepare()
            call()
        prepare()
        python, functions = function_calls(call)
        prepare()
        with _Attributes() as attributes:
            call()
        prepare()
        with profile() as profiled:
            call()
    events = profiled.kineto_results.experimental_event_tree()
    return HostCalls(python, functions + attributes.reads, sum(map(_asked, events)))


def function_calls(call: Callable[[], object]) -> tuple[int, int]:
    """Count the calls of Python functions and of C functions, in this thread, the first time that it runs."""
    python = c = 0
    device: FrameType | None = None

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal python, c, device
        if device is not None:
            if frame is device and event == "return":
                device = None
        elif event == "call":
            if frame.f_code.co_filename.startswith(_DEVICE):
                device = frame
            else:
                python += 1
        elif event == "c_call" and argument is not sys.setprofile:
            c += 1

    before = sys.getprofile()
    with _no_collection():
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(before)
    return python, c


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector, and the Python that it calls for what it finds, out of a count."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Attributes(TorchFunctionMode):
    """Counts the attributes of tensors that are read, for which Python calls no function."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_function__(self, function, types, args=(), kwargs=None) -> Any:
        files = (frame.f_code.co_filename for frame, _ in walk_stack(None))
        if function.__name__ == "__get__" and not any(file.startswith(_DEVICE) for file in files):
            self.reads += 1
        return function(*args, **(kwargs or {}))


def _asked(event: Any) -> int:
    """Operators and nodes in an event of the profiler, but for those in a kernel of the device."""
    namespace, _, name = event.name.partition("::")
    is_operator = name and namespace not in ("autograd", "torch")
    calls = int(bool(is_operator) or event.name.startswith(_NODE))
    return calls if event.name in _kernels() else calls + sum(map(_asked, event.children))


@cache
def _kernels() -> frozenset[str]:
    """The operators of which the device has kernels, as the profiler names them: without overloads."""
    operators = {name: aten._overload(name) for name in aten._registered("PrivateUse1") - aten.NATIVE}
    aten_calls = [name for name, op in operators.items() if op is not None and not aten._is_view(op)]
    names = [f"aten::{name}" for name in aten_calls] + [f"npu::{name}" for name in FORMULAS]
    return frozenset(name.partition(".")[0] for name in names)
