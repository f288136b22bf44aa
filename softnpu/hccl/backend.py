"""The backend of a process group on software devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch.utils._pytree import tree_map_only

from softnpu.hccl import NAME
from softnpu.hosting import HostCall

LOOPBACK = "127.0.0.1"

# By the name of their group, which is all that an operator says of it. They are kept here: the group itself holds what
# is below Python only.
groups: dict[str, HCCL] = {}


class HCCL(ProcessGroupGloo):
    """What ``group._get_backend(torch.device("npu"))`` returns, registered for NPU tensors and no others.

    Attributes:
        on_host: a process group of the same ranks in which this backend serves CPU tensors.
        pending: the works of a coalescing block, None outside of one.
    """

    def __init__(self, options: Any) -> None:
        gloo = ProcessGroupGloo._Options()
        gloo._timeout = options.timeout
        gloo._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        super().__init__(options.store, options.group_rank, options.group_size, gloo)
        self._set_sequence_number_for_group()
        self.pending: list[Any] | None = None
        self.on_host = ProcessGroup(options.store, options.group_rank, options.group_size)
        self.on_host._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.on_host._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self)
        for name in groups.keys() - dist.distributed_c10d._world.pg_names.values():
            del groups[name]  # destroyed
        groups[options.group_id] = self

    def name(self) -> str:
        """As torch_npu's is called."""
        return NAME

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Of ``init_process_group(device_id=...)``: connections are there from the start."""

    # torch_npu calls these on the backend, without an operator
    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """For ``dist.gather``, which torch_npu makes of it."""
        return self.on_host.allgather(*_on_host("allgather", outputs, inputs), *options)

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> dist.Work:
        """For ``dist.gather`` where compatible implementations are switched on."""
        return self.on_host.gather(*_on_host("gather", outputs, inputs), *options)

    def batch_isend_irecv(self, kinds: Sequence[str], tensors: Sequence[Tensor], peers: Sequence[int]) -> dist.Work:
        """For ``dist.batch_isend_irecv`` on chips before 910B."""
        pairs = zip(kinds, tensors, peers)
        return Works([getattr(self.on_host, kind[1:])(_on_host(kind, [t]), peer, 0) for kind, t, peer in pairs])


class Works(dist.Work):
    """Several works as one."""

    def __init__(self, works: list[Any]) -> None:
        super().__init__()
        self.works = works

    def wait(self, *_: Any) -> bool:
        """Until the last of them is done."""
        return all(work.wait() for work in self.works)

    def is_completed(self) -> bool:
        """Whether all of them are."""
        return all(work.is_completed() for work in self.works)


def _on_host(name: str, *values: Any) -> Any:
    mapped = tree_map_only(Tensor, HostCall(name).alias, values)
    return mapped if len(values) > 1 else mapped[0]
