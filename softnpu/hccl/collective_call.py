"""Carry one call of a ``c10d::`` operator from the caller's NPU tensors to gloo, over the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from softnpu.collective_counting import Collective, count_collective
from softnpu.hccl.backend import HCCL
from softnpu.host_call import HostCall


class CollectiveCall:
    """Hold the arguments of one call, and run the operator again on the host.

    Attributes:
        name: of the operator, without namespace.
        given: its arguments, by name.
        on_host: the group in which gloo serves CPU tensors.
        ranks: how many processes the group has.
        rank: which of them this is.
    """

    def __init__(self, op: torch._ops.OpOverload, name: str, backend: HCCL, given: dict[str, Any]) -> None:
        self.name, self.given = name, given
        self.on_host, self.ranks, self.rank = backend.on_host, backend.size(), backend.rank()
        self._op, self._backend, self._host = op, backend, HostCall(name)

    def count(self, operator: str, tensors: Iterable[Tensor], size: int) -> None:
        """Count a call of ``size`` bytes whose tensors are what HCCL takes, after a look at their devices."""
        for tensor in tensors:
            self._backend.agreement.use(tensor.device)
        count_collective(Collective(operator, self._backend.group_name, self.ranks), size)

    def agree(self, operator: str, *same: object) -> None:
        """Compare this call with those of the other ranks: all have to call it with the same arguments."""
        self._backend.agreement.call(f"{operator}({', '.join(str(item).removeprefix('torch.') for item in same)})")

    def host(self, tensor: Tensor) -> Tensor:
        """Make a CPU tensor over the same bytes."""
        return self._host.alias(tensor)

    def bytes(self, tensor: Tensor) -> Tensor:
        """View the bytes of a contiguous tensor: gloo does not know all dtypes."""
        return flat(self.host(tensor)).view(torch.uint8)

    def rows(self, tensor: Tensor) -> Tensor:
        """View the bytes of a contiguous tensor, in rows of its first dimension."""
        return self.bytes(tensor).view(tensor.size(0), math.prod(tensor.shape[1:]) * tensor.itemsize)

    def with_itself(self, operator: str, data: Tensor, tag: int) -> Work:
        """Send to, or receive from, the own rank, which a batch of both can.

        Raises:
            RuntimeError: the call stands alone: no rank waits for itself.
        """
        if self._backend.pending is None:
            raise RuntimeError(f"{operator} with the own rank ({self.rank}) is for dist.batch_isend_irecv only")
        return self._backend.self_sends.add(operator, data, tag)

    def again(self, **replaced: Any) -> Work:
        """Run the operator on the host, with other arguments in place of those that are named."""
        result = self._op(**self.given | replaced | {"process_group": self.on_host.boxed()})
        return Work.unbox(result[-1] if isinstance(result, tuple) else result)


Run = Callable[[CollectiveCall], Work]
OPERATORS: dict[str, Run] = {}


def operator(name: str) -> Callable[[Run], Run]:
    """Register the function below as the device's kernel of ``c10d::<name>``."""

    def register(run: Run) -> Run:
        OPERATORS[name] = run
        return run

    return register


def flat(host: Tensor) -> Tensor:
    """View the elements of a contiguous tensor as they lie in memory."""
    return host.as_strided((host.numel(),), (1,), host.storage_offset())


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Add up the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def sizes(tensors: Iterable[Tensor]) -> str:
    """Write the number of elements of each tensor: ``4 + 6``."""
    return " + ".join(str(tensor.numel()) for tensor in tensors)
