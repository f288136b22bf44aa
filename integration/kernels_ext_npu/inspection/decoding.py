"""Counts a step of decoding: one token a row, behind the tokens that a cache holds."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import Cache

from kernels_ext_npu.inspection.counting import Axes, Counting, Inputs, count_layers
from kernels_ext_npu.inspection.counts import Counts
from kernels_ext_npu.inspection.known_values import KnownValues
from kernels_ext_npu.inspection.roofline import Soc
from kernels_ext_npu.inspection.subject import CannotInspectError

GROWING, STATIC = "decode_growing", "decode_static"
PHASES = {GROWING: "decode step, growing cache", STATIC: "decode step, static cache"}


def refuse(model: PreTrainedModel) -> None:
    """Refuse a model that decodes no text behind a prompt of text.

    Raises:
        CannotInspectError: it does not.
    """
    if model.main_input_name != "input_ids" or model.config.is_encoder_decoder or not model.can_generate():
        raise CannotInspectError(
            f"--decode: {type(model).__name__} does not go on with a text; counted can be models that generate from "
            "input_ids, without an encoder"
        )


def count_growing(model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes) -> Counts:
    """Count a step with a cache that takes as much memory as it has tokens.

    Raises:
        UnknownValueError: the model reads a value on the host that follows from weights.
    """
    return _count(model, inputs, values, soc, axes, is_static=False)


def count_static(model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes) -> Counts:
    """Count the last step of a cache that has room for the tokens and one more.

    Raises:
        UnknownValueError: the model reads a value on the host that follows from weights.
    """
    return _count(model, inputs, values, soc, axes, is_static=True)


def replays(phase: str, counts: Counts) -> int:
    """Return how many graphs a step is with ``CompileConfig(backend="NPUGraph")``.

    It is none where the host waits, or copies what it has to the device.
    """
    return int(phase == STATIC and not counts.waits and not counts.copies_in)


def _count(
    model: PreTrainedModel, inputs: Inputs, values: KnownValues, soc: Soc, axes: Axes, is_static: bool
) -> Counts:
    model.eval()
    ids = inputs["input_ids"]
    rows, tokens = ids.shape
    config = model.config.get_text_config(decoder=True)

    def step(costs: Counting) -> None:
        cache = StaticCache(config, max_cache_len=tokens + 1) if is_static else DynamicCache(config=config)
        given: dict[str, Any] = {"past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            model(**inputs | given)
            token, place = ids[:, -1:], torch.full((rows, 1), tokens, device=ids.device)
            if "position_ids" in inspect.signature(model.forward).parameters:
                given["position_ids"] = place  # generate has it from the step before
            costs.start(*_tensors(cache))
            model(input_ids=token, **given)

    return count_layers(model, inputs, lambda: Counting(values, soc, axes), step)


def _tensors(cache: Cache) -> list[Tensor]:
    found = [value for layer in cache.layers for value in vars(layer).values()]
    return [value for value in found if isinstance(value, Tensor)]
