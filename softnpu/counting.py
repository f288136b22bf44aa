"""Count what a program makes the device do: operator calls, and the points where the host waits for it."""

from __future__ import annotations

import ctypes
import threading

from softnpu.collective_counting import forget_collectives

STREAM_SYNCS = "stream_syncs"
DEVICE_TO_HOST_COPIES = "device_to_host_copies"

_calls: dict[str, int] = {}
_calls_in_graphs: dict[str, int] = {}
_lock = threading.Lock()  # backward runs in a thread of its own
_runtime: ctypes.CDLL | None = None
_runtime_start = {STREAM_SYNCS: 0, DEVICE_TO_HOST_COPIES: 0}


def attach(runtime: ctypes.CDLL) -> None:
    """Read the counters of the runtime library as well: torch_npu calls it directly."""
    global _runtime
    _runtime = runtime
    for name in _runtime_start:
        getattr(runtime, f"softnpu_{name}").restype = ctypes.c_uint64


def count(name: str, calls: int = 1) -> None:
    """Add calls to the count of an operator."""
    with _lock:
        _calls[name] = _calls.get(name, 0) + calls


def count_in_graph(name: str) -> None:
    """Add a call to the count of an operator that the replay of a graph runs."""
    with _lock:
        _calls_in_graphs[name] = _calls_in_graphs.get(name, 0) + 1


def count_wait(copies: bool) -> None:
    """Count a point where the host waits for the device; with ``copies`` it also reads a value."""
    count(STREAM_SYNCS)
    if copies:
        count(DEVICE_TO_HOST_COPIES)


def counters(in_graphs: bool = False) -> dict[str, int]:
    """Return the counts since the last reset: operator name -> calls, ``stream_syncs`` and ``device_to_host_copies``.

    Operators are named without namespace and overload: ``npu_rms_norm``, ``mm``, ``add``. Views launch nothing and
    are not counted. ``stream_syncs`` counts every point where the host waits for the device: ``.item()``,
    ``.cpu()``, ``bool(tensor)``, ``torch.npu.synchronize()``, and operators whose result has a shape that depends
    on data, as ``nonzero``. ``device_to_host_copies`` counts those that move data to the host.

    What is captured into a graph is not counted: nothing runs. A replay counts as one in ``graph_replays``; with
    ``in_graphs`` the operators are returned that replays ran, for which the host launched nothing.

    Example:
        >>> import softnpu
        >>> import torch
        >>> x = torch.ones(2, 3, device="npu")
        >>> softnpu.reset_counters()
        >>> (x + x).sum().item()
        12.0
        >>> softnpu.counters()
        {'add': 1, 'sum': 1, '_local_scalar_dense': 1, 'stream_syncs': 1, 'device_to_host_copies': 1}
    """
    if in_graphs:
        with _lock:
            return dict(_calls_in_graphs)
    with _lock:
        result = dict(_calls)
    for name, start in _runtime_start.items():
        result[name] = result.get(name, 0) + _read(name) - start
    return result


def reset_counters() -> None:
    """Set all counts of operators, waits and collectives back to zero.

    Example:
        >>> import softnpu
        >>> import torch
        >>> x = torch.ones(2, 3, device="npu").cpu()
        >>> softnpu.reset_counters()
        >>> softnpu.counters()
        {'stream_syncs': 0, 'device_to_host_copies': 0}
    """
    forget_collectives()
    with _lock:
        _calls.clear()
        _calls_in_graphs.clear()
    for name in _runtime_start:
        _runtime_start[name] = _read(name)


def _read(name: str) -> int:
    return getattr(_runtime, f"softnpu_{name}")() if _runtime else 0
