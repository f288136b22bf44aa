"""Counts what a forward, and a step of training, of a model on fake tensors costs; layers that are alike only once."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.utils import import_utils

from kernels_ext_npu.inspection import collectives
from kernels_ext_npu.inspection.counts import Collective, Counts, Layer
from kernels_ext_npu.inspection.fallbacks import fallback
from kernels_ext_npu.inspection.known_values import KnownValues
from kernels_ext_npu.inspection.memory import Memory, weight_bytes
from kernels_ext_npu.inspection.repetition import Kind, NotRepeatableError, few, find_kinds
from kernels_ext_npu.inspection.roofline import Soc, seconds
from kernels_ext_npu.measuring.costs import Cost
from kernels_ext_npu.swapping.attention import calls
from kernels_ext_npu.swapping.named_implementation import NPU_FLASH_ATTENTION

Inputs = dict[str, Tensor]
Axes = Mapping[str, tuple[str, ...]]


class Counting(Cost):
    """A count of what runs on fake tensors of an NPU, for as long as the context is open.

    Args:
        axes: the axes that process groups serve, by the names of the groups.
    """

    def __init__(self, values: KnownValues, soc: Soc, axes: Axes | None = None) -> None:
        super().__init__()
        self.values, self.soc, self.memory = values, soc, Memory()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[Collective] = Counter()
        self.messages: Counter[Collective] = Counter()
        self._axes = axes or {}
        self._waits_before, self._copies_before = values.waits, values.copies_in

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
        else:
            moved = self.count(operator, args, kwargs, result)
            if moved is not None:
                name = operator._schema.name.partition("::")[2]
                self.seconds[name] += seconds(self.soc, operator, args, kwargs, result, moved)
        self.memory.add(value for value in tree_leaves(result) if isinstance(value, Tensor))
        return result

    def start(self, *kept: Tensor) -> None:
        """Forget what was counted so far. Tensors that are kept from it count no memory."""
        self.memory.exclude(kept)
        self.memory.start()
        self.go_on()

    def go_on(self) -> None:
        """Forget what was counted so far, but for the memory that is taken."""
        for counted in (self.launches, self.bytes, self.seconds, self.calls, self.messages):
            counted.clear()
        self.memory.peak = self.memory.current
        self._waits_before, self._copies_before = self.values.waits, self.values.copies_in

    def counts(self) -> Counts:
        """Return what was counted so far."""
        waits, copies = self.values.waits - self._waits_before, self.values.copies_in - self._copies_before
        return Counts(
            self.launches, self.bytes, self.seconds, self.calls, self.messages, waits, copies, self.memory.peak
        )

    def _count_message(self, operator: torch._ops.OpOverload, args: tuple, kwargs: dict, result: Any) -> None:
        message = collectives.message(operator, args, kwargs, result)
        if message is None:
            return
        axis = collectives.axis(message.operator, self._axes.get(message.group.group_name, ()))
        key = Collective(message.operator, axis, message.group.size())
        self.calls[key] += 1
        self.messages[key] += message.bytes
        if message.cloned:
            self.launches["clone"] += 1
            self.bytes["clone"] += 2 * message.cloned
            self.seconds["clone"] += 2 * message.cloned / self.soc.bandwidth
        if operator is torch.ops.c10d._reduce_scatter_base_.default:
            self.memory.exclude([args[0]])  # FSDP2's: what comes out is the gradient of weights


def count_forward(
    model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes | None = None
) -> Counts:
    """Count a forward without gradients, before which no weight is gathered.

    Raises:
        UnknownValueError: the model reads a value on the host that follows from weights.
    """
    model.eval()

    def forward(_: Counting) -> None:
        with torch.no_grad():
            model(**inputs)

    return count_layers(model, inputs, lambda: Counting(values, soc, axes), forward)


def count_step(
    model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes | None = None
) -> Counts:
    """Count a forward and backward.

    Raises:
        UnknownValueError: the model reads a value on the host that follows from weights.
    """
    model.train()

    def step(_: Counting) -> None:
        _loss(model(**inputs)).backward()
        model.zero_grad(set_to_none=True)

    return count_layers(model, inputs, lambda: Counting(values, soc, axes), step)


def count_training_forward(
    model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes | None = None
) -> Counts:
    """Count the forward of a step, which keeps what its backward needs.

    Raises:
        UnknownValueError: the model reads a value on the host that follows from weights.
    """
    model.train()
    return count_layers(model, inputs, lambda: Counting(values, soc, axes), lambda _: _loss(model(**inputs)))


def count_backward(
    model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes | None = None
) -> Counts:
    """Count the backward of a step, whose peak is beside what the forward has kept.

    Raises:
        UnknownValueError: the model reads a value on the host that follows from weights.
    """
    model.train()

    def backward(costs: Counting) -> None:
        loss = _loss(model(**inputs))
        costs.go_on()
        loss.backward()
        model.zero_grad(set_to_none=True)

    return count_layers(model, inputs, lambda: Counting(values, soc, axes), backward)


def count_clipping(
    model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes | None = None
) -> Counts:
    """Count what ``clip_grad_norm_`` does with the gradients of all weights that are trained."""
    parameters = _with_gradients(model)
    return _count_update(
        model, parameters, lambda: clip_grad_norm_(parameters, 1.0, foreach=True), Counting(values, soc, axes)
    )


def count_optimizer(
    model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes | None = None
) -> Counts:
    """Count a step of AdamW over all weights that are trained, once its state is there."""
    parameters = _with_gradients(model)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        averages = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        with _disable_current_modes():
            number = torch.tensor(1.0)
        optimizer.state[parameter] = {"step": values.learn(torch.empty(()), number), **averages}
    return _count_update(model, parameters, optimizer.step, Counting(values, soc, axes))


def _with_gradients(model: PreTrainedModel) -> list[nn.Parameter]:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    return parameters


def _count_update(
    model: PreTrainedModel, parameters: list[nn.Parameter], update: Callable[[], Any], costs: Counting
) -> Counts:
    """Count what is done with all weights at once, in lists: no layer can be left out."""
    costs.memory.exclude([*model.parameters(), *model.buffers()])
    costs.memory.exclude([parameter.grad for parameter in parameters if parameter.grad is not None])
    with _untraced(), costs.values.read_at_once(), costs:
        update()
    model.zero_grad(set_to_none=True)
    return costs.counts()


def count_layers(
    model: PreTrainedModel,
    inputs: Inputs,
    counting: Callable[[], Counting],
    run: Callable[[Counting], object],
    apart: Sequence[list[nn.Module]] = (),
) -> Counts:
    """Count two layers of each kind, and once more three of one kind, for what each further one costs."""
    kinds = [kind for kind in find_kinds(model) if kind.layers not in apart]
    if NPU_FLASH_ATTENTION.is_registered():
        calls.make_ready()  # which is no cost of a forward

    def count(one_more: Kind | None = None) -> Counts:
        costs = counting()
        given = [value for value in inputs.values() if isinstance(value, Tensor)]
        costs.memory.exclude([*model.parameters(), *model.buffers(), *given])
        hooks = costs.memory.exclude_gradients(model)
        try:
            with _untraced(), costs.values.read_at_once(), costs.memory.resized(), few(kinds, one_more), costs:
                run(costs)
        finally:
            if isinstance(model, FSDPModule):
                model.reset_iter_state()  # after a forward without a backward some weights are still gathered
            for hook in hooks:
                hook.remove()
        return costs.counts()

    try:
        base = count()
    except NotRepeatableError as error:
        return count_layers(model, inputs, counting, run, [*apart, error.kind.layers])
    total = Counts()
    total.add(base, 1 - sum(kind.left_out for kind in kinds))
    for kind in kinds:
        more = count(kind)
        total.add(more, kind.left_out)
        more.add(base, -1)
        total.layers.append(Layer(kind.name, len(kind.layers), weight_bytes(kind.layers[0]), more))
    return total


@contextmanager
def _untraced() -> Iterator[None]:
    """Let transformers take fake tensors for real ones.

    It takes them for a sign of tracing, and then makes masks that a model at work goes without.
    """
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
