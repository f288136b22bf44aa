"""Define the backend of a process group on software devices."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo
from torch_npu._C._distributed_c10d import ProcessGroupHCCL

from softnpu.hccl import NAME
from softnpu.hccl.rank_agreement import Agreement
from softnpu.hccl.self_sends import SelfSends

LOOPBACK = "127.0.0.1"

# By the name of their group, which is all that an operator says of it. They are kept here, until their group is shut
# down: the group itself holds what is below Python only.
groups: dict[str, HCCL] = {}
_shared: weakref.ref[Any] | None = None


class HCCL(ProcessGroupGloo):
    """Serve the NPU tensors of a process group: ``group._get_backend(torch.device("npu"))`` returns this.

    Attributes:
        group_name: of its process group.
        on_host: a process group of the same ranks in which this backend serves CPU tensors.
        pending: the works of a coalescing block, None outside of one.
        self_sends: what this rank sends to itself in one.
        agreement: what this rank has to agree on with the others.
    """

    supports_splitting = False  # as torch_npu's: split_group and new_group with a bound device ask

    def __init__(self, options: Any) -> None:
        gloo = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        gloo._timeout = options.timeout
        self._transport = _transport()
        gloo._devices = [self._transport]
        store = _fresh(options.store, options.group_size)
        super().__init__(store, options.group_rank, options.group_size, gloo)
        self._set_sequence_number_for_group()
        self.group_name: str = options.group_id
        self.pending: list[dist.Work] | None = None
        self.self_sends = SelfSends()
        self.agreement = Agreement(store, self.group_name, options.group_rank, options.group_size)
        self.on_host = ProcessGroup(store, options.group_rank, options.group_size)
        self.on_host._set_default_backend(ProcessGroup.BackendType.GLOO)
        self.on_host._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, self)
        groups[self.group_name] = self

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # what isinstance asks besides the type
        """Be a ``ProcessGroupHCCL`` to programs and to torch_npu, which look for one."""
        return ProcessGroupHCCL

    def name(self) -> str:
        """Return ``hccl``, the name of torch_npu's own backend."""
        return NAME

    def get_hccl_comm_name(self, rank: int, init_comm: bool = True) -> str:
        """Return the name of the communicator, as operators that communicate take it for their group."""
        return self.group_name

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: ``init_process_group(device_id=...)`` asks for connections, which are there from the start."""

    # torch_npu calls these on the backend. Its group has an operator for each.
    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any) -> dist.Work:
        """Gather to all ranks for ``dist.gather``, which torch_npu makes of it."""
        return self._group().allgather(outputs, inputs, *options)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *options: Any) -> dist.Work:
        """Gather to one rank for ``dist.gather`` where compatible implementations are switched on."""
        return self._group().gather(outputs, inputs, *options)

    def batch_isend_irecv(self, kinds: Sequence[str], tensors: Sequence[Tensor], peers: Sequence[int]) -> dist.Work:
        """Send and receive for ``dist.batch_isend_irecv`` where HCCL has no coalescing."""
        group = self._group()
        run = {"isend": group.send, "irecv": group.recv}
        device = torch.device("npu")
        group._start_coalescing(device)
        for kind, tensor, peer in zip(kinds, tensors, peers):
            run[kind]([tensor], peer, 0)
        return group._end_coalescing(device)

    def all_gather_into_tensor_uneven(self, output: Tensor, tensor: Tensor, splits: Sequence[int]) -> dist.Work:
        """Gather parts of several sizes for ``torch_npu.distributed.all_gather_into_tensor_uneven``."""
        return self._group().allgather([_split(output, splits, self.size())], [tensor])

    def reduce_scatter_tensor_uneven(
        self, output: Tensor, tensor: Tensor, splits: Sequence[int], options: Any
    ) -> dist.Work:
        """Reduce to parts of several sizes for ``torch_npu.distributed.reduce_scatter_tensor_uneven``."""
        return self._group().reduce_scatter([output], [_split(tensor, splits, self.size())], options)

    def alltoallvc(self, output: Tensor, tensor: Tensor, matrix: Sequence[int]) -> dist.Work:
        """Serve ``torch_npu.distributed.all_to_all_vc``: ``matrix[i * ranks + j]`` elements go from rank i to j."""
        rank, ranks = self.rank(), self.size()
        given, received = list(matrix[rank * ranks : (rank + 1) * ranks]), list(matrix[rank::ranks])
        return self._group().alltoall_base(output.view(-1), tensor.view(-1), received, given)

    def _group(self) -> ProcessGroup:
        return dist.distributed_c10d._resolve_process_group(self.group_name)  # type: ignore[arg-type]


def _transport() -> Any:
    """Return what carries all groups of this process, until the last of them ends. It has a thread that polls."""
    global _shared
    transport = _shared() if _shared else None
    if transport is None:
        transport = ProcessGroupGloo.create_device(hostname=LOOPBACK)
        _shared = weakref.ref(transport)
    return transport


def _fresh(store: dist.Store, ranks: int) -> dist.Store:
    """Return a part of the store that no earlier group of this name used: programs destroy groups and begin again."""
    arrived = store.add(f"arrived/{ranks}", 1)
    return dist.PrefixStore(f"{ranks}/{(arrived - 1) // ranks}", store)


def _split(tensor: Tensor, splits: Sequence[int], ranks: int) -> list[Tensor]:
    return list(tensor.split(list(splits) or tensor.size(0) // ranks))
