"""Swaps kernels into a model that is already loaded, and out again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, TypeVar

from torch import nn

from kernels_ext_npu.api import pipeline
from kernels_ext_npu.reporting.report import report
from kernels_ext_npu.swapping import experts, forwards, packing, rotary, state, table, waiting
from kernels_ext_npu.swapping.devices import computes_on, on_its_way

if TYPE_CHECKING:
    from kernels import Mode

Model = TypeVar("Model", bound=nn.Module)

logger = logging.getLogger("kernels_ext_npu")


def kernelize(model: Model, mode: Mode | None = None) -> Model:
    """Swap the kernels into a model on the NPU. Registers the bundled kernels if none are registered.

    A model without weights yet, all of whose parameters are on meta, takes them for the NPU too. Once its weights are
    loaded kernelize it again: gate and up of its MLPs become one product then.

    Args:
        model: a transformers model, or any module that contains one.
        mode: a ``kernels.Mode``; by default training or inference, as the model is.

    Returns:
        The model itself.

    Raises:
        ValueError: no part of the model is on the NPU.
    """
    devices = {computes_on(tensor) for tensor in (*model.parameters(), *model.buffers())}
    with on_its_way(model) as without_weights:
        if "npu" not in devices and not without_weights:
            given = ", ".join(sorted(devices)) or "no device"
            raise ValueError(f"kernelize: the model is on {given}; move it first: model.to('npu')")
        if state.current is None:
            from kernels_ext_npu.api.register import register  # which is given what this file defines

            register()

        def take(mode: Mode) -> None:
            table.hand_over()
            pipeline.take_for_npu(model, mode)
            _set_use_kernels(model, True)

        pipeline.run(model, mode, take)
    return model


def kernelize_at_first_call(model: nn.Module) -> None:
    """Swap the kernels into a model that waited, and log the report, on one rank."""
    kernelize(model)
    level = logging.WARNING if os.environ.get("RANK", "0") == "0" else logging.DEBUG
    logger.log(level, "kernels-ext-npu: %s at its first forward:\n%s", type(model).__name__, report(model))


def restore(model: Model) -> Model:
    """Put the original forwards back; the model stays as it is through later ``train()``, ``eval()`` and calls.

    The rotary functions that the model calls go back for all models of its architecture: they are one object for the
    process.

    Returns:
        The model itself.
    """
    packing.unpack(model)
    experts.restore(model)
    for module in model.modules():
        waiting.forget(module)
        forwards.take_out(module)
    rotary.restore(model)
    _set_use_kernels(model, False)
    return model


def _set_use_kernels(model: nn.Module, value: bool) -> None:
    """Tell the outermost transformers models whether to swap kernels again when the mode changes."""
    for pretrained in _pretrained(model):
        vars(pretrained)["_use_kernels"] = value


def _pretrained(module: nn.Module) -> Iterator[nn.Module]:
    from transformers import PreTrainedModel

    if isinstance(module, PreTrainedModel):
        yield module
        return
    for child in module.children():
        yield from _pretrained(child)
