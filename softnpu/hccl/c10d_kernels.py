"""Replace torch_npu's ``c10d::`` operators, which call HCCL itself, by our own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, ProcessGroup
from torch.distributed import Work
from torch.utils._pytree import tree_map_only

from softnpu import graph_capture
from softnpu.dynamo_exclusion import untraced
from softnpu.hccl import data_movement, reductions  # noqa: F401  they register their operators
from softnpu.hccl.backend import groups
from softnpu.hccl.collective_call import OPERATORS, CollectiveCall
from softnpu.hccl.combined_works import Works
from softnpu.host_call import HostCall
from softnpu.kernel_registration import replace_kernel

c10d = torch.library.Library("c10d", "IMPL")


@functools.cache
def install() -> None:
    """Replace the operators, and the three methods of a group that do not end in one."""
    for registration in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
        namespace, _, name = registration.partition("::")
        if namespace == "c10d" and name in OPERATORS:
            replace_kernel(c10d, name, _kernel(getattr(torch.ops.c10d, name).default))
    reductions.remember_factors()
    for method in (_start_coalescing, _end_coalescing, shutdown):
        original = getattr(ProcessGroup, method.__name__)
        setattr(ProcessGroup, method.__name__, functools.partialmethod(method, original))


def _kernel(op: torch._ops.OpOverload) -> Callable[..., Any]:
    name = op._schema.name.partition("::")[2]
    parameters = [argument.name for argument in op._schema.arguments]
    defaults = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
    run = OPERATORS[name]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given: dict[str, Any] = defaults | dict(zip(parameters, args)) | kwargs
        group = ProcessGroup.unbox(given["process_group"])
        if graph_capture.captured and graph_capture.current() is not None:
            raise NotImplementedError(f"c10d::{name}: the software device captures no collectives into graphs")
        backend = groups.get(group.group_name)
        if backend is None:
            return _elsewhere(op, name, given, group)
        work = run(CollectiveCall(op, name, backend, given))
        if backend.pending is not None:
            backend.pending.append(work)
        return (given[parameters[0]], work.boxed()) if len(op._schema.returns) == 2 else work.boxed()

    return untraced(kernel)


def _elsewhere(op: torch._ops.OpOverload, name: str, given: dict[str, Any], group: ProcessGroup) -> Any:
    """Run an operator in a group whose backend for NPU tensors is not ours, as the fake one.

    The group gets a twin that has this backend for CPU tensors.
    """
    call = HostCall(name)
    twin = ProcessGroup(HashStore(), group.rank(), group.size())
    twin._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    backend = group._get_backend(torch.device("npu"))
    twin._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend)
    result = op(**tree_map_only(Tensor, call.alias, given) | {"process_group": twin.boxed()})
    return tree_map_only(Tensor, call.leave, result)


# gloo has no coalescing blocks: the works of one are collected, and waited for together
def _start_coalescing(group: ProcessGroup, original: Callable, device: torch.device) -> None:
    backend = groups.get(group.group_name)
    if backend is None or device.type != "npu":
        original(group, device)
    else:
        backend.pending = []


def _end_coalescing(group: ProcessGroup, original: Callable, device: torch.device) -> Work:
    backend = groups.get(group.group_name)
    if backend is None or device.type != "npu":
        return original(group, device)
    works, backend.pending = backend.pending, None
    backend.self_sends.end()
    return Works(works or [])


def shutdown(group: ProcessGroup, original: Callable) -> None:
    """Shut a group down and forget its backend, when ``destroy_process_group`` is called."""
    original(group)
    groups.pop(group.group_name, None)
