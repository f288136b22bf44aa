"""What is counted of a model on fake tensors: a forward, a step of training and its parts, a step of decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import clip_grad_norm_
from torch.utils._python_dispatch import _disable_current_modes
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.utils import import_utils

from kernels_ext_npu.binding import registration
from kernels_ext_npu.binding.named_implementation import NPU_FLASH_ATTENTION
from kernels_ext_npu.inspection.counting.counts import Counts, Layer
from kernels_ext_npu.inspection.counting.dispatch import Axes, Counting
from kernels_ext_npu.inspection.counting.known_values import KnownValues
from kernels_ext_npu.inspection.counting.memory import weight_bytes
from kernels_ext_npu.inspection.counting.repetition import Kind, NotRepeatableError, few, find_kinds
from kernels_ext_npu.measuring.distance import tensors
from kernels_ext_npu.measuring.roofline import Soc
from kernels_ext_npu.transformers_internals import cache_parameter

Inputs = dict[str, Any]

GROWING, STATIC = "decode_growing", "decode_static"
DECODING = {GROWING: "decode step, growing cache", STATIC: "decode step, static cache"}


def count(
    phase: str, model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes | None = None
) -> Counts:
    """Count a phase of the work of a model.

    Args:
        phase: ``forward`` is one without gradients, before which no weight is gathered; ``step`` a forward and a
            backward; ``training_forward`` keeps what its backward needs; the peak of ``backward`` is beside what that
            has kept; ``clipping`` is ``clip_grad_norm_`` of all weights that are trained, and ``optimizer`` a step of
            AdamW over them, once its state is there; GROWING is a token behind the inputs with a cache that takes as
            much memory as it has tokens, STATIC the last one of a cache that has room for one more.
    """
    costs = partial(Counting, values, soc, axes)
    if phase in ("clipping", "optimizer"):
        return _count_update(phase, model, costs())
    model.train(phase in ("step", "training_forward", "backward"))
    return count_layers(model, inputs, costs, partial(_RUN[phase], model, inputs))


def replays(phase: str, counts: Counts) -> int:
    """Return how many graphs a step is with ``CompileConfig(backend="NPUGraph")``.

    It is none where the host waits, or copies what it has to the device.
    """
    return int(phase == STATIC and not counts.waits and not counts.copies_in)


def count_layers(
    model: PreTrainedModel,
    inputs: Inputs,
    counting: Callable[[], Counting],
    run: Callable[[Counting], object],
    apart: Sequence[list[nn.Module]] = (),
) -> Counts:
    """Count two layers of each kind, and once more three of one kind, for what each further one costs."""
    kinds = [kind for kind in find_kinds(model) if kind.layers not in apart]
    _make_causal_mask()

    def count(one_more: Kind | None = None) -> Counts:
        costs = counting()
        costs.memory.exclude([*model.parameters(), *model.buffers(), *tensors(inputs)])
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


def _forward(model: PreTrainedModel, inputs: Inputs, costs: Counting) -> None:
    with torch.no_grad():
        model(**inputs)


def _training_forward(model: PreTrainedModel, inputs: Inputs, costs: Counting) -> Tensor:
    output = model(**inputs)
    if getattr(output, "loss", None) is not None:
        return output.loss
    return next(tensor for tensor in tensors(output) if tensor.requires_grad).sum()


def _step(model: PreTrainedModel, inputs: Inputs, costs: Counting) -> None:
    _training_forward(model, inputs, costs).backward()
    model.zero_grad(set_to_none=True)


def _backward(model: PreTrainedModel, inputs: Inputs, costs: Counting) -> None:
    loss = _training_forward(model, inputs, costs)
    costs.go_on()
    loss.backward()
    model.zero_grad(set_to_none=True)


def _decode(is_static: bool, model: PreTrainedModel, inputs: Inputs, costs: Counting) -> None:
    ids = inputs["input_ids"]
    rows, tokens = ids.shape
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config, max_cache_len=tokens + 1) if is_static else DynamicCache(config=config)
    given: dict[str, Any] = {cache_parameter(model.forward): cache, "use_cache": True}
    with torch.no_grad():
        model(**inputs | given)
        token, place = ids[:, -1:], torch.full((rows, 1), tokens, device=ids.device)
        if "position_ids" in inspect.signature(model.forward).parameters:
            given["position_ids"] = place  # generate has it from the step before
        costs.start(*tensors([vars(layer) for layer in cache.layers]))
        model(input_ids=token, **given)


_RUN: dict[str, Callable[..., object]] = {
    "forward": _forward,
    "step": _step,
    "training_forward": _training_forward,
    "backward": _backward,
    GROWING: partial(_decode, False),
    STATIC: partial(_decode, True),
}


def _count_update(phase: str, model: PreTrainedModel, costs: Counting) -> Counts:
    """Count what is done with all weights at once, in lists: no layer can be left out."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    costs.memory.exclude([*model.parameters(), *model.buffers()])
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
        costs.memory.exclude([parameter.grad])
        averages = {name: torch.empty_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        with _disable_current_modes():
            number = torch.tensor(1.0)
        optimizer.state[parameter] = {"step": costs.values.learn(torch.empty(()), number), **averages}
    with _untraced(), costs.values.read_at_once(), costs:
        if phase == "clipping":
            clip_grad_norm_(parameters, 1.0, foreach=True)
        else:
            optimizer.step()
    model.zero_grad(set_to_none=True)
    return costs.counts()


def _untraced() -> AbstractContextManager:
    """Let transformers take fake tensors for real ones.

    It takes them for a sign of tracing, and then makes masks that a model at work goes without.
    """
    return patch.object(import_utils, "is_fake_tensor", lambda x: False)


def _make_causal_mask() -> None:
    """Let attention make the mask that causal calls of all lengths share: it is no cost of a forward."""
    if NPU_FLASH_ATTENTION.is_registered():
        with torch.no_grad():
            registration.package(NPU_FLASH_ATTENTION.repository).flash_attn_func(
                *torch.empty(3, 1, 2, 1, 16, dtype=torch.bfloat16, device="npu"), causal=True
            )
