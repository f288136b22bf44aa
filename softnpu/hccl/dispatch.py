"""torch_npu's ``c10d::`` operators, carried out by torch's own for the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._pytree import tree_leaves, tree_map_only

from softnpu.hccl.backend import HCCL, Works, groups
from softnpu.hosting import HostCall
from softnpu.traffic import count_collective

c10d = torch.library.Library("c10d", "IMPL")


@functools.cache
def install() -> None:
    """Replace torch_npu's kernels, which call HCCL itself."""
    for registration in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, name = registration.partition("::")
        if namespace == "c10d":
            c10d.impl(name, _on_gloo(getattr(torch.ops.c10d, name).default), "PrivateUse1", allow_override=True)
    _add_coalescing()


def _on_gloo(op: torch._ops.OpOverload) -> Callable[..., Any]:
    name = op._schema.name.partition("::")[2]

    def kernel(*args: Any) -> Any:
        call = HostCall(name)
        group = _group(args)
        backend = groups.get(group.group_name) if group is not None else None
        if backend is not None:
            count_collective(name, group.group_name, backend.size(), [_bytes(arg) for arg in args])
        host_args = [_enter(call, arg, backend) for arg in args]
        result = tree_map_only(Tensor, call.leave, op(*host_args))
        if backend is not None and backend.pending is not None:
            backend.pending.append(dist.Work.unbox(result[-1] if isinstance(result, tuple) else result))
        return result

    return kernel


def _group(args: tuple) -> ProcessGroup | None:
    for arg in args:
        if isinstance(arg, torch.ScriptObject) and arg._type().name() == "ProcessGroup":
            return ProcessGroup.unbox(arg)
    return None


def _enter(call: HostCall, arg: Any, backend: HCCL | None) -> Any:
    if backend is not None and isinstance(arg, torch.ScriptObject) and arg._type().name() == "ProcessGroup":
        return backend.on_host.boxed()
    return tree_map_only(Tensor, call.alias, arg)


def _bytes(arg: Any) -> int:
    return sum(tensor.nbytes for tensor in tree_leaves(arg) if isinstance(tensor, Tensor))


def _add_coalescing() -> None:
    """gloo has no coalescing blocks: the works of one are collected, and waited for together."""
    start, end = ProcessGroup._start_coalescing, ProcessGroup._end_coalescing

    def start_coalescing(group: ProcessGroup, device: torch.device) -> None:
        backend = groups.get(group.group_name)
        if backend is None or device.type != "npu":
            start(group, device)
        else:
            backend.pending = []

    def end_coalescing(group: ProcessGroup, device: torch.device) -> Any:
        backend = groups.get(group.group_name)
        if backend is None or device.type != "npu":
            return end(group, device)
        works, backend.pending = backend.pending, None
        return Works(works or [])

    ProcessGroup._start_coalescing, ProcessGroup._end_coalescing = start_coalescing, end_coalescing
