"""Measure how long the host is busy with a call on the software device: all of it but the operators' kernels.

On a card an operator is put into a queue, and what remains is Python, the dispatcher and autograd. On the software
device the operator's formula runs in between: here the clock stands still while it does.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

import torch

import softnpu
from softnpu import aten_kernels as aten
from softnpu.aten_missing_on_cpu import FORMULAS as OF_ATEN
from softnpu.formulas import FORMULAS as OF_NPU
from softnpu.host_kernel import on_host
from softnpu.kernel_registration import replace_kernel

_in_kernels = 0.0


@contextmanager
def stopped_clock() -> Iterator[None]:
    """Within it the kernels of the software device are clocked; those of a card run beside the host."""
    if not softnpu.is_software():
        yield
        return
    libraries = [torch.library.Library(namespace, "IMPL") for namespace in ("aten", "npu")]
    try:
        for name in aten._registered("PrivateUse1"):
            op = aten._overload(name)
            if op is None or name in aten.NATIVE or aten._is_view(op):
                continue
            if name in OF_ATEN or aten._runs_on_host(op):
                kernel = _clocked(on_host(op, OF_ATEN.get(name)))
                replace_kernel(libraries[0], name, kernel)
        for name, formula in OF_NPU.items():
            base, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.npu, base), overload or "default")
            replace_kernel(libraries[1], name, _clocked(on_host(op, formula)))
        yield
    finally:
        for library in libraries:
            library._destroy()


def host_times(
    calls: dict[str, Callable[[], object]], turns: int, repeats: int = 20, prepare: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Measure the seconds of the host for each of some calls, which take turns of some repeats.

    Whatever else the machine does only adds to a time, so that the least is the nearest; but one in twenty is taken,
    since the clock has steps too. ``prepare`` runs before each call, and is not measured.
    """
    for call in calls.values():
        prepare()
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            for name, call in calls.items():
                times[name] += [_host_time(call, prepare) for _ in range(repeats)]
    finally:
        gc.enable()
    return {name: sorted(measured)[len(measured) // 20] for name, measured in times.items()}


def _host_time(call: Callable[[], object], prepare: Callable[[], object]) -> float:
    global _in_kernels
    prepare()
    _in_kernels = 0.0
    start = perf_counter()
    call()
    return perf_counter() - start - _in_kernels


def _clocked(kernel: Callable) -> Callable:
    def clocked(*args, **kwargs):
        global _in_kernels
        start = perf_counter()
        try:
            return kernel(*args, **kwargs)
        finally:
            _in_kernels += perf_counter() - start

    return clocked
