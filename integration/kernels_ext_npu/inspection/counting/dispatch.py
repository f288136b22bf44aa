"""Counts what every operator costs that runs on fake tensors of an NPU."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import get_process_group_ranks
from torch.distributed.tensor import DTensor

from kernels_ext_npu.inspection.counting import collectives
from kernels_ext_npu.inspection.counting.counts import Collective, Counts
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.memory import Memory
from kernels_ext_npu.measuring.costs import Cost, byte_size, composed, what_runs
from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.measuring.estimate import Workload
from kernels_ext_npu.measuring.inside import Inside
from kernels_ext_npu.measuring.products import flops, multiplies, operator_name
from kernels_ext_npu.measuring.roofline import Soc, seconds

Axes = defaultdict[str, tuple[str, ...]]


class Counting(Cost):
    """A count of what runs on fake tensors of an NPU, for as long as the context is open.

    Args:
        axes: the axes that process groups serve, by the names of the groups.
    """

    def __init__(self, values: KnownValues, soc: Soc, axes: Axes | None = None) -> None:
        super().__init__()
        self.values, self.soc, self.memory = values, soc, Memory()
        self.workload = Workload(soc)
        self._axes = Axes(tuple) if axes is None else axes
        self.go_on()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # these call the operators that run, which come here, too
        kwargs = kwargs or {}
        if (formula := composed(operator)) is not None:
            with self:
                return formula(*args, **kwargs)
        name, _ = what_runs(operator, args, kwargs)
        workspace = 0
        if name == "mm" and operator is torch.ops.aten._grouped_mm.default:  # a loop
            self.values.waits += 1
            result = _product_by_groups(*args, **kwargs)
        else:
            result = self.values.run(operator, args, kwargs)
        if collectives.is_collective(operator):
            self._count_message(operator, args, kwargs, result)
        elif (runs := self.count(operator, args, kwargs, result)) is not None:
            is_product = multiplies(operator_name(operator))
            multiplied = flops(operator, *self.values.with_lists(args, kwargs), result) if is_product else 0
            dtype = next((tensor.dtype for tensor in tensors((args, kwargs))), None)
            self._add(name, runs, multiplied, dtype)
            self.workload.add(name, runs, multiplied, dtype, (args, kwargs), result)
            workspace = runs.workspace
        self.memory.add(tensors(result), workspace)
        return result

    def _add(self, name: str, runs: Inside, multiplied: float, dtype: torch.dtype | None) -> None:
        """Add the time of the kernels of a call at the peaks, and of its product alone."""
        counts = self._counts
        counts.flops[name] += multiplied
        share = multiplied / max(1, sum(kernel.is_main for kernel in runs.kernels))  # products of equal size
        for kernel in runs.kernels:
            at_peak = seconds(self.soc, share if kernel.is_main else 0, dtype, kernel.moved)
            counts.seconds[name] += at_peak
            if kernel.on_ai_cpu:
                counts.on_ai_cpu[name] += 1
        if multiplies(name):
            counts.product_seconds[name] += seconds(self.soc, multiplied, dtype, runs.outside)

    def numbers(self, tensor: Tensor) -> list[int] | None:
        """Return what a tensor on the device holds where that is known."""
        return self.values.numbers(tensor)

    def start(self, *kept: Tensor) -> None:
        """Forget what was counted so far. Tensors that are kept from it count no memory."""
        self.memory.exclude(kept)
        self.memory.start()
        self.go_on()

    def go_on(self) -> None:
        """Forget what was counted so far, but for the memory that is taken."""
        for counter in (self.launches, self.kernels, self.bytes, self.not_read):
            counter.clear()
        self.workload.start()
        self._counts = Counts(self.launches, self.kernels, self.bytes, self.not_read, work=self.workload.parts)
        self.memory.peak = self.memory.current
        self.values.waits = self.values.copies_in = 0

    def counts(self) -> Counts:
        """Return what was counted so far."""
        self._counts.waits, self._counts.copies_in = self.values.waits, self.values.copies_in
        self._counts.peak = self.memory.peak
        return self._counts

    def _count_message(self, operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> None:
        name = collectives.collective_name(operator)
        if name is None:
            return
        group = collectives.group(operator, args, kwargs)
        key = Collective(name, collectives.axis(name, self._axes[group.group_name]), group.size())
        self._counts.calls[key] += 1
        # what is reduced, gathered, scattered or exchanged as a whole: the larger side of it
        size = max(byte_size(value) for value in (*args, *kwargs.values(), result))
        self._counts.messages[key] += size
        self.workload.add_collective(name, get_process_group_ranks(group), size, key.axis in ("fsdp", "efsdp"))
        if collectives.clones(operator) and (cloned := 2 * byte_size(result)):
            self.launches["clone"] += 1
            self.kernels["clone"] += 1
            self.bytes["clone"] += cloned
            self._counts.seconds["clone"] += cloned / self.soc.bandwidth
            self._counts.work["memory"] += cloned / self.soc.bandwidth
            self._counts.work["kernel"] += 1
            self._counts.work["launch"] += 1
        if operator is torch.ops.c10d._reduce_scatter_base_.default and key.axis != "cp":
            self.memory.exclude([args[0]])  # FSDP2's: what comes out is the gradient of weights


def _product_by_groups(left: Tensor, right: Tensor, offs: Tensor, *_: Any, **options: Any) -> Tensor:
    """Make the result of ``_grouped_mm``, of whatever sizes and dtypes: its own meta kernel refuses what a loop takes.

    ``[T, K]`` and ``[G, K, N]`` make ``[T, N]``; ``[G, M, K]`` and ``[K, T]`` make ``[M, T]``; ``[M, T]`` and
    ``[T, N]`` make ``[G, M, N]``.
    """
    groups = (offs.numel(),) if left.dim() == right.dim() == 2 else ()
    return left.new_empty(*groups, left.shape[-2], right.shape[-1])
