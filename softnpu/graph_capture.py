"""Keep what is launched on a stream while it is captured, and run it when its graph is replayed.

torch_npu's own ``NPUGraph`` calls the functions of streams.c, and those call ``_on_graph`` here. As on a card, a
captured operator is not computed: its results hold nothing until the graph is replayed, which runs the same launches
again over the same memory. torch_npu's allocator keeps that memory for the graph, in a pool of its own.
"""

from __future__ import annotations

import atexit
import ctypes
import enum
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._C import _AutoDispatchBelowAutograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch_npu import npu
from torch_npu._C import _npu_getCurrentRawStream

from softnpu.counting import count, count_in_graph

# how often graphs were replayed, in counters()
REPLAYS = "graph_replays"


class Launch(Protocol):
    """Be something that a replay runs."""

    name: str

    def __call__(self) -> None:
        """Run over the memory that the captured call was given."""

    def end_of_capture(self) -> None:
        """Note what is known when the capture ends."""


class Group(list[Launch]):
    """Hold launches that an update may replace: ``torch.npu.graph_task_group_begin``."""


class Graph:
    """Hold what was captured.

    Attributes:
        launches: in the order of the host's calls, which no stream's order contradicts.
        read: by address, the storages that somebody else has to keep for the graph, and the first operator there.
    """

    def __init__(self) -> None:
        self.launches: list[Launch | Group] = []
        self.read: dict[int, tuple[StorageWeakRef, str]] = {}

    def flat(self) -> list[Launch]:
        """Return all launches, those of groups too."""
        return [one for item in self.launches for one in (item if isinstance(item, Group) else [item])]

    def reads(self, name: str, storages: list[torch.UntypedStorage]) -> None:
        """Note the storages of a launch."""
        for storage in storages:
            before = self.read.get(storage.data_ptr())
            if before is None or before[0].expired():
                self.read[storage.data_ptr()] = StorageWeakRef(storage), name

    def replay(self) -> None:
        """Run all launches."""
        self._refuse_freed_memory()
        count(REPLAYS)
        # a graph that is captured without gradients is replayed without: nothing here may look at the caller's modes
        with torch.inference_mode(False), torch.no_grad(), _AutoDispatchBelowAutograd():
            for launch in self.flat():
                count_in_graph(launch.name)
                launch()

    def _refuse_freed_memory(self) -> None:
        """Refuse to read what was freed after the capture, where a card would read whatever is there by then."""
        expired = [address for address, (storage, _) in self.read.items() if storage.expired()]
        if not expired:
            return
        kept = _kept_memory()
        for address in expired:
            if not any(start <= address < end for start, end in kept):
                raise RuntimeError(
                    f"a graph is replayed after memory that it reads or writes, in {self.read[address][1]}, was freed: "
                    "keep the tensors that a captured region takes from outside"
                )
            del self.read[address]  # freed into the pool of the graph, or the memory of another storage too


class Stream:
    """Say where launches on a stream go."""

    def __init__(self, address: int, graph: Graph, launches: list[Any]) -> None:
        self.address = address
        self.graph = graph
        self.launches = launches


# By the address of the stream: those that are captured, and those on which a group is updated.
captured: dict[int, Stream] = {}
_graphs: dict[int, Graph] = {}
_groups: dict[int, tuple[Graph, Group]] = {}


def current() -> Stream | None:
    """Return where the launches of this thread's stream are kept, None if they run."""
    return captured.get(_npu_getCurrentRawStream(npu.current_device()))


def keep(stream: Stream, launch: Launch, storages: list[torch.UntypedStorage]) -> None:
    """Keep a launch for the replays, which work on these storages."""
    _runtime.softnpu_launched(stream.address)
    stream.graph.reads(launch.name, storages)
    stream.launches.append(launch)


def refuse_wait(what: str) -> None:
    """Raise as torch_npu does when the host waits for a stream that is captured.

    Raises:
        RuntimeError: with the code of ``ACL_ERROR_RT_STREAM_CAPTURED``.
    """
    raise RuntimeError(
        f"{what}: the host waits for the device, which it cannot while a graph is captured (aclrtSynchronizeStream, "
        "error code is 107027, stream is captured)"
    )


def _kept_memory() -> list[tuple[int, int]]:
    """Return the addresses of all memory that is allocated, or that the allocator keeps for graphs."""
    kept = []
    for segment in npu.memory_snapshot():
        if tuple(segment["segment_pool_id"]) != (0, 0):
            kept.append((segment["address"], segment["address"] + segment["total_size"]))
        blocks = [block for block in segment["blocks"] if block["state"] == "active_allocated"]
        kept += [(block["address"], block["address"] + block["size"]) for block in blocks]
    return kept


class _Happening(enum.IntEnum):
    """Name what streams.c tells, in the order of its ``enum happening``."""

    BEGIN, JOIN, END, REPLAY, DESTROY, MEMCPY, MEMSET, GROUP_BEGIN, GROUP_END, UPDATE_BEGIN, UPDATE_END = range(11)


class _MemoryLaunch:
    """Copy or set memory in a replay, as torch_npu asked the runtime for."""

    def __init__(self, name: str, function: Callable[..., Any], *args: Any) -> None:
        self.name = name
        self._run = lambda: function(*args)

    def __call__(self) -> None:
        self._run()

    def end_of_capture(self) -> None:
        pass


def _begin(graph: int, stream: int, *_: Any) -> None:
    _graphs[graph] = Graph()
    _join(graph, stream)


def _join(graph: int, stream: int, *_: Any) -> None:
    captured[stream] = Stream(stream, _graphs[graph], _graphs[graph].launches)


def _end(graph: int, stream: int, *_: Any) -> None:
    ended = _graphs[graph]
    for launch in ended.flat():
        launch.end_of_capture()
    for address in [a for a, s in captured.items() if s.graph is ended]:
        del captured[address]


def _replay(graph: int, *_: Any) -> None:
    _graphs[graph].replay()


def _destroy(graph: int, *_: Any) -> None:
    gone = _graphs.pop(graph, None)
    for handle in [h for h, (owner, _) in _groups.items() if owner is gone]:
        del _groups[handle]


def _copy(graph: int, stream: int, to: int, source: int, size: int, value: int) -> None:
    keep(captured[stream], _MemoryLaunch("aclrtMemcpyAsync", ctypes.memmove, to, source, size), [])


def _set(graph: int, stream: int, to: int, source: int, size: int, value: int) -> None:
    keep(captured[stream], _MemoryLaunch("aclrtMemsetAsync", ctypes.memset, to, value, size), [])


def _group_begin(graph: int, stream: int, *_: Any) -> None:
    target = captured[stream]
    group = Group()
    target.launches.append(group)
    target.launches = group


def _group_end(graph: int, stream: int, handle: int, *_: Any) -> None:
    target = captured[stream]
    group = target.launches
    assert isinstance(group, Group)
    _groups[id(group)] = target.graph, group
    target.launches = target.graph.launches
    ctypes.c_void_p.from_address(handle).value = id(group)


def _update_begin(graph: int, stream: int, handle: int, *_: Any) -> None:
    owner, group = _groups[handle]
    group.clear()
    captured[stream] = Stream(stream, owner, group)


def _update_end(graph: int, stream: int, *_: Any) -> None:
    for launch in captured.pop(stream).launches:
        launch.end_of_capture()


_ANSWERS: dict[_Happening, Callable[..., None]] = {
    _Happening.BEGIN: _begin, _Happening.JOIN: _join, _Happening.END: _end, _Happening.REPLAY: _replay,
    _Happening.DESTROY: _destroy, _Happening.MEMCPY: _copy, _Happening.MEMSET: _set,
    _Happening.GROUP_BEGIN: _group_begin, _Happening.GROUP_END: _group_end,
    _Happening.UPDATE_BEGIN: _update_begin, _Happening.UPDATE_END: _update_end,
}  # fmt: skip

SUCCESS, FAILURE = 0, 500000  # of acl/acl_base.h
_address = ctypes.c_void_p


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, _address, _address, _address, _address, ctypes.c_uint64, ctypes.c_int)
def _on_graph(what: int, *about: Any) -> int:
    try:
        _ANSWERS[_Happening(what)](*about)
    except Exception as error:  # it cannot go through C: the runtime's message carries it
        _runtime.softnpu_say(f"{type(error).__name__}: {error}".encode())
        return FAILURE
    return SUCCESS


def attach(runtime: ctypes.CDLL) -> None:
    """Let the runtime library tell of captures and replays."""
    global _runtime
    _runtime = runtime
    runtime.softnpu_launched.argtypes = [ctypes.c_void_p]
    runtime.softnpu_on_graph(_on_graph)
    atexit.register(runtime.softnpu_on_graph, None)  # graphs may outlive the interpreter


_runtime: ctypes.CDLL
