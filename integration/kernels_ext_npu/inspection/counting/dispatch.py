"""Counts what every operator costs that runs on fake tensors of an NPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from kernels_ext_npu.inspection.counting import collectives
from kernels_ext_npu.inspection.counting.counts import Collective, Counts
from kernels_ext_npu.inspection.counting.fallbacks import fallback
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.memory import Memory
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.measuring.products import flops
from kernels_ext_npu.measuring.roofline import Soc, seconds

Axes = Mapping[str, tuple[str, ...]]


class Counting(Cost):
    """A count of what runs on fake tensors of an NPU, for as long as the context is open.

    Args:
        axes: the axes that process groups serve, by the names of the groups.
    """

    def __init__(self, values: KnownValues, soc: Soc, axes: Axes | None = None) -> None:
        super().__init__()
        self.values, self.soc, self.memory = values, soc, Memory()
        self._counts = Counts(self.launches, self.bytes)
        self._axes = axes or {}
        self._before = values.waits, values.copies_in

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | AsyncCollectiveTensor) for kind in types):
            return NotImplemented  # these call the operators that run, which come here, too
        kwargs = kwargs or {}
        if (loop := fallback(operator)) is not None:
            self.values.waits += 1
            with self:
                return loop(*args, **kwargs)
        result = self.values.run(operator, args, kwargs)
        if collectives.is_collective(operator):
            self._count_message(operator, args, kwargs, result)
        elif (moved := self.count(operator, args, kwargs, result)) is not None:
            name = operator._schema.name.partition("::")[2]
            multiplied = flops(operator, args, kwargs, result)
            dtype = next((leaf.dtype for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)), None)
            self._counts.flops[name] += multiplied
            self._counts.seconds[name] += seconds(self.soc, multiplied, dtype, moved)
        self.memory.add(value for value in tree_leaves(result) if isinstance(value, Tensor))
        return result

    def start(self, *kept: Tensor) -> None:
        """Forget what was counted so far. Tensors that are kept from it count no memory."""
        self.memory.exclude(kept)
        self.memory.start()
        self.go_on()

    def go_on(self) -> None:
        """Forget what was counted so far, but for the memory that is taken."""
        self._counts.clear()
        self.memory.peak = self.memory.current
        self._before = self.values.waits, self.values.copies_in

    def counts(self) -> Counts:
        """Return what was counted so far."""
        found, (waits, copies) = self._counts, self._before
        found.waits, found.copies_in = self.values.waits - waits, self.values.copies_in - copies
        found.peak = self.memory.peak
        return found

    def _count_message(self, operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> None:
        message = collectives.message(operator, args, kwargs, result)
        if message is None:
            return
        axis = collectives.axis(message.operator, self._axes.get(message.group.group_name, ()))
        key = Collective(message.operator, axis, message.group.size())
        self._counts.calls[key] += 1
        self._counts.messages[key] += message.bytes
        if message.cloned:
            self.launches["clone"] += 1
            self.bytes["clone"] += 2 * message.cloned
            self._counts.seconds["clone"] += 2 * message.cloned / self.soc.bandwidth
        if operator is torch.ops.c10d._reduce_scatter_base_.default:
            self.memory.exclude([args[0]])  # FSDP2's: what comes out is the gradient of weights
