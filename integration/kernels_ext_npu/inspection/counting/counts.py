"""What a computation costs a rank, as numbers that can be added."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kernels_ext_npu.measuring.estimate import Estimate, estimate


class Collective(NamedTuple):
    """A collective operator over the ranks of an axis of the mesh."""

    # its name in ``torch.distributed``: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``
    operator: str
    axis: str  # ``tp``, ``fsdp``, ``ep``, ``cp``, or ``efsdp``, over which FSDP2 shards experts
    ranks: int  # how many ranks take part


@dataclass
class Counts:
    """What a computation costs a rank."""

    launches: Counter[str] = field(default_factory=Counter)  # the number of launches by the host, by operator
    kernels: Counter[str] = field(default_factory=Counter)  # the number of kernels on the device, by operator
    bytes: Counter[str] = field(default_factory=Counter)  # the bytes that these read and write, by operator
    # those of operators of which nobody read what CANN does inside, by operator
    not_read: Counter[str] = field(default_factory=Counter)
    # the additions and multiplications of products in them, by operator
    flops: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    # the time that they take at the peaks of a chip, by operator
    seconds: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    # that of operators that multiply, by operator, if nothing were copied or cast for them
    product_seconds: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    # what an estimate of time is made of, by the names of the rates
    work: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))
    # the number of kernels on the AI CPU, by operator
    on_ai_cpu: Counter[str] = field(default_factory=Counter)
    # the number of calls of collectives, which are no launches
    calls: Counter[Collective] = field(default_factory=Counter)
    # the bytes of what is reduced, gathered, scattered or exchanged, by collective
    messages: Counter[Collective] = field(default_factory=Counter)
    waits: int = 0  # how often the host waits for the device
    copies_in: int = 0  # how often the host copies to the device
    peak: int = 0  # the most bytes that live at once beyond weights and their gradients
    layers: list[Layer] = field(default_factory=list)  # what each further layer of a kind adds to these

    @property
    def estimate(self) -> Estimate:
        """How long it takes, by what others measured."""
        return estimate(self.work)

    @property
    def roofline(self) -> float:
        """The seconds of all launches at the peaks of a chip."""
        return sum(self.seconds.values())

    @property
    def products(self) -> float:
        """The seconds of what multiplies matrices alone, at the peaks: attention and convolutions are among it."""
        return sum(self.product_seconds.values())

    def add(self, other: Counts, times: int = 1) -> None:
        """Add what another computation costs, so many times."""
        for name, theirs in vars(other).items():
            if isinstance(theirs, dict):
                mine = getattr(self, name)
                for key, count in theirs.items():
                    mine[key] += times * count
        self.waits += times * other.waits
        self.copies_in += times * other.copies_in
        self.peak += times * other.peak


@dataclass
class Layer:
    """What one layer of a kind costs."""

    name: str  # the name of its class
    number: int  # how many layers of this kind there are
    weights: int  # the bytes of the weights of one of them that a rank holds
    counts: Counts  # the costs of one of them; its peak is what it adds to that of the model
