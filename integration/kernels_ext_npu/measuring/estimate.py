"""How long a phase takes in eager mode, estimated: what its kernels take on the device, or the host to launch them.

The longer one decides. Kernels follow each other: each takes a start, and its products at a part of the chip's peak or
its bytes at a part of the memory's bandwidth, more of it where they are in the cache still. The parts are fitted to
half of what others measured on a 910B2 and tested on the other half (``scripts/estimate.py``, tests/data/measured.json,
docs/estimates.md); nothing of it was measured by us. In a graph the host launches nothing, the device decides, and a
kernel starts sooner. Collectives take their links, and a start; those of FSDP2 run beside the kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from kernels_ext_npu.measuring.costs import Cost, what_runs
from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.measuring.inside import Inside
from kernels_ext_npu.measuring.products import flops
from kernels_ext_npu.measuring.roofline import Soc

CACHE = 192_000_000  # bytes of the L2 of a 910B
# nine of ten figures of the half that was not fitted are at most so many times larger or smaller
SPREAD = 1.37


@dataclass(frozen=True)
class Rates:
    """What the parts of a workload take; its fields are their names."""

    # parts of the peak that products reach, in a forward and in a backward, and attention
    product: float = 0.88
    product_backward: float = 0.82
    attention: float = 0.35
    # of the memory's bandwidth: bytes that come from it, or go to it, and bytes that are in the cache
    memory: float = 0.69
    cache: float = 1.4
    # of the links between devices
    mesh: float = 0.67
    switch: float = 0.79
    # seconds of the device for each kernel, in a graph too, for each one of attention, and for each collective
    kernel: float = 9.9e-6
    graph_kernel: float = 4.2e-6
    attention_kernel: float = 56e-6
    collective: float = 6.5e-6
    # seconds of the host for each launch, in a forward and in a backward, and for each further kernel of one
    launch: float = 31e-6
    launch_backward: float = 23e-6
    further_kernel: float = 12e-6
    # seconds of the host before the first launch of a call that is timed by itself, and of its backward
    start: float = 97e-6
    start_backward: float = 190e-6


RATES = Rates()
KERNELS = ("product", "product_backward", "attention", "memory", "cache")
LINKS = ("mesh", "switch")
PARTS = (*KERNELS, *LINKS)  # of a peak; the others are seconds for each
DEVICE = (*KERNELS, "kernel", "graph_kernel", "attention_kernel")
COLLECTIVES = (*LINKS, "collective")
BESIDE = "beside_"  # before the names of collectives that run beside the kernels
HOST = ("launch", "launch_backward", "further_kernel", "start", "start_backward")


@dataclass(frozen=True)
class Estimate:
    """The seconds of the device and of the host for a phase."""

    device: float  # collectives that nothing hides among them
    host: float
    collectives: float = 0.0
    graph: float = 0.0  # those of the device if it replays a graph

    @property
    def seconds(self) -> float:
        """Those of the phase in eager mode."""
        return max(self.device, self.host)

    @property
    def decided_by(self) -> str:
        """Who takes longer: ``host`` or ``device``."""
        return "host" if self.host > self.device else "device"

    @property
    def range(self) -> tuple[float, float]:
        """The least and the most seconds that nine of ten are within."""
        return self.seconds / SPREAD, self.seconds * SPREAD


def estimate(work: Mapping[str, float], rates: Rates = RATES) -> Estimate:
    """Estimate how long a workload takes, by the names of its parts."""

    def taken(names: tuple[str, ...], prefix: str = "") -> float:
        seconds = ((name, work.get(prefix + name, 0.0), getattr(rates, name)) for name in names)
        return sum(amount / rate if name in PARTS else amount * rate for name, amount, rate in seconds)

    kernels = taken(DEVICE)
    collectives = taken(COLLECTIVES) + max(0.0, taken(COLLECTIVES, BESIDE) - kernels)
    sooner = work.get("kernel", 0.0) * (rates.kernel - rates.graph_kernel)
    return Estimate(kernels + collectives, taken(HOST), collectives, kernels + collectives - sooner)


class Workload:
    """What runs on a chip, by the names of `Rates`: seconds at its peaks, and how many launches and kernels."""

    def __init__(self, soc: Soc) -> None:
        self.soc = soc
        self.parts: defaultdict[str, float] = defaultdict(float)
        self._touched = WeakIdKeyDictionary()  # storage -> the bytes that had moved when it was last read or written
        self._moved = 0

    def start(self) -> None:
        """Forget all, and take the cache for empty."""
        self.parts = defaultdict(float)
        self._touched.clear()

    def add(self, name: str, runs: Inside, flops: float, dtype: torch.dtype | None, given: Any, result: Any) -> None:
        """Add a launch: its kernels, the additions and multiplications of its products, and its tensors."""
        backward = _direction()
        cached = self._touch(given, result)
        share = flops / max(1, sum(kernel.is_main for kernel in runs.kernels))
        kind = "attention" if "attention" in name else f"product{backward}"
        for kernel in runs.kernels:
            multiplied = share / self.soc.peak(dtype) if kernel.is_main else 0.0
            moved = kernel.moved / self.soc.bandwidth
            if multiplied > moved:
                self.parts[kind] += multiplied
            else:
                self.parts["memory"] += (1 - cached) * moved
                self.parts["cache"] += cached * moved
            self.parts["attention_kernel" if share and kernel.is_main and kind == "attention" else "kernel"] += 1
        self.parts[f"launch{backward}"] += 1
        self.parts["further_kernel"] += max(0, len(runs.kernels) - 1)

    def add_collective(self, operator: str, ranks: Sequence[int], size: int, is_beside: bool) -> None:
        """Add a collective with a message of so many bytes, and its launch, which nobody measured apart."""
        prefix = BESIDE if is_beside else ""
        self.parts[prefix + self.soc.links.kind] += self.soc.links.seconds(operator, ranks, size)
        self.parts[f"{prefix}collective"] += 1
        self.parts[f"launch{_direction()}"] += 1

    def _touch(self, given: Any, result: Any) -> float:
        """Return which part of the bytes of a launch is in the cache, and note that it was there.

        That is an operand of which, with the launch, no more has moved since than the cache holds, and a result of
        which with its operands no more than that is made. A weight that is read once a step is never there.
        """
        read, written = (_storages(each) for each in (given, result))
        size = sum(read.values()) + sum(written.values())
        hit = sum(written.values()) if size <= CACHE else 0
        for storage, nbytes in read.items():
            if storage in self._touched and self._moved - self._touched[storage] + size <= CACHE:
                hit += nbytes
        self._moved += size
        for storage in (*read, *written):
            self._touched[storage] = self._moved
        return hit / size if size else 0.0


class WorkCost(Cost):
    """A count of launches, kernels and bytes, and of the workload on a chip."""

    def __init__(self, soc: Soc) -> None:
        super().__init__()
        self.workload = Workload(soc)

    def count(self, operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> Inside | None:
        """Count a call, and return what runs for it; None if it is no launch."""
        runs = super().count(operator, args, kwargs, result)
        if runs is not None:
            name, _ = what_runs(operator, args, kwargs)
            dtype = next((tensor.dtype for tensor in tensors((args, kwargs))), None)
            self.workload.add(name, runs, flops(operator, args, kwargs, result), dtype, (args, kwargs), result)
        return runs


def _direction() -> str:
    """Return what ends the names of rates of a backward, while one runs."""
    return "_backward" if torch._C._current_graph_task_id() != -1 else ""


def _storages(values: Any) -> WeakIdKeyDictionary:
    """Return the bytes of tensors by their storages."""
    found = WeakIdKeyDictionary()
    for tensor in tensors(values):
        found[tensor.untyped_storage()] = tensor.nbytes
    return found
