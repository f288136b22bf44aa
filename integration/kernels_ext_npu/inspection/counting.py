"""Counts what a forward, and a step of training, of a model on fake tensors costs; layers that are alike only once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.utils import import_utils

from kernels_ext_npu.costs import Cost
from kernels_ext_npu.inspection.fallbacks import fallback
from kernels_ext_npu.inspection.known_values import KnownValues
from kernels_ext_npu.inspection.memory import Memory
from kernels_ext_npu.inspection.repetition import Kind, NotRepeatableError, few, find_kinds
from kernels_ext_npu.inspection.roofline import Soc, seconds

Inputs = dict[str, Tensor]


@dataclass
class Counts:
    """What something costs.

    Attributes:
        launches: by operator.
        bytes: that go in and out of them, by operator.
        seconds: the least time that they take on a chip, by operator.
        waits: how often the host waits for the device.
        peak: the most bytes that live at once beyond weights and their gradients.
    """

    launches: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: int = 0
    peak: int = 0

    def add(self, other: Counts, times: int = 1) -> None:
        """Add what something else costs, so many times."""
        for name in ("launches", "bytes", "seconds"):
            mine, theirs = getattr(self, name), getattr(other, name)
            for operator, count in theirs.items():
                mine[operator] += times * count
        self.waits += times * other.waits
        self.peak += times * other.peak


class Counting(Cost):
    """Counts while the context is open, on fake tensors of an NPU."""

    def __init__(self, values: KnownValues, soc: Soc) -> None:
        super().__init__()
        self.values, self.soc, self.memory = values, soc, Memory()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._waits_before = values.waits

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if (loop := fallback(operator)) is not None:
            self.values.waits += 1
            with self:
                return loop(*args, **kwargs)
        result = self.values.run(operator, args, kwargs)
        moved = self.count(operator, args, kwargs, result)
        if moved is not None:
            name = operator._schema.name.partition("::")[2]
            self.seconds[name] += seconds(self.soc, operator, args, kwargs, result, moved)
        self.memory.add(value for value in tree_leaves(result) if isinstance(value, Tensor))
        return result

    def counts(self) -> Counts:
        """What was counted so far."""
        waits = self.values.waits - self._waits_before
        return Counts(self.launches, self.bytes, self.seconds, waits, self.memory.peak)


def count_forward(model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc) -> Counts:
    """A forward without gradients."""
    model.eval()

    def forward() -> None:
        with torch.no_grad():
            model(**inputs)

    return _count(model, inputs, values, soc, forward)


def count_step(model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc) -> Counts:
    """A forward and backward; the optimiser's step is none of the kernels'."""
    model.train()

    def step() -> None:
        _loss(model(**inputs)).backward()
        model.zero_grad(set_to_none=True)

    return _count(model, inputs, values, soc, step)


def _count(
    model: PreTrainedModel,
    inputs: Inputs,
    values: KnownValues,
    soc: Soc,
    run: Callable[[], None],
    apart: Sequence[list[nn.Module]] = (),
) -> Counts:
    """With two layers of each kind, and once more with three of one kind, for what each further one costs."""
    kinds = [kind for kind in find_kinds(model) if kind.layers not in apart]

    def count(one_more: Kind | None = None) -> Counts:
        counting = Counting(values, soc)
        given = [value for value in inputs.values() if isinstance(value, Tensor)]
        counting.memory.exclude([*model.parameters(), *model.buffers(), *given])
        hooks = counting.memory.exclude_gradients(model)
        try:
            with _untraced(), few(kinds, one_more), counting:
                run()
        finally:
            for hook in hooks:
                hook.remove()
        return counting.counts()

    try:
        base = count()
    except NotRepeatableError as error:
        return _count(model, inputs, values, soc, run, [*apart, error.kind.layers])
    total = Counts()
    total.add(base, 1 - sum(kind.left_out for kind in kinds))
    for kind in kinds:
        total.add(count(kind), kind.left_out)
    return total


@contextmanager
def _untraced() -> Iterator[None]:
    """transformers takes fake tensors for a sign of tracing, and then makes masks that a model at work goes without."""
    before = import_utils.is_fake_tensor
    import_utils.is_fake_tensor = lambda x: False
    try:
        yield
    finally:
        import_utils.is_fake_tensor = before


def _loss(output: Any) -> Tensor:
    if getattr(output, "loss", None) is not None:
        return output.loss
    return next(value for value in tree_leaves(output) if isinstance(value, Tensor) and value.requires_grad).sum()
