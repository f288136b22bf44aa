"""Whole tiny models on the device with kernels, against their originals on the host: those of the demo."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

import kernels_ext_npu
import softnpu
from kernels_ext_npu.demo import comparison, tiny_models
from kernels_ext_npu.measuring import waits
from kernels_ext_npu.measuring.distance import OF_MODELS, distance, distances, models_agree, worst


def compare(name: str, source: str) -> dict[str, Any]:
    """Run a model of the demo, in float32, and return what a report says of it.

    Args:
        name: the name in the demo.
        source: where the kernels come from, as register() takes it.
    """
    kernels_ext_npu.register(source=source)
    try:
        with tempfile.TemporaryDirectory() as folder:
            tiny_models.save(name, Path(folder))
            torch.manual_seed(0)
            original = comparison.load(Path(folder))
            made = tiny_models.inputs(original.config)
            expected = comparison.logits(original, made)
            gradients = comparison.gradients(original, made)
            model = comparison.load(Path(folder), device_map="npu", use_kernels=True)
        return _compared(model, tiny_models.on("npu", made), expected, gradients)
    finally:
        kernels_ext_npu.unregister()
        gc.collect()


def _compared(
    model: Any, made: tiny_models.Inputs, expected: torch.Tensor, gradients: comparison.Gradients
) -> dict[str, Any]:
    swapped = sum(row.swapped for row in kernels_ext_npu.report(model))
    forward = distance(comparison.logits(model, made), expected).largest
    with waits.counted() as of_a_forward:
        comparison.logits(model, made)
    measured = distances(comparison.gradients(model, made), gradients).values()
    backward = worst(each.norm for each in measured)
    with waits.counted() as of_a_step:
        comparison.gradients(model, made)
    return {
        "forward": forward,
        "backward": backward,
        "tolerance": OF_MODELS[softnpu.is_software()],
        "agrees": models_agree(forward, backward) and swapped > 0,
        "swapped": swapped,
        "waits": [of_a_forward.number, of_a_step.number],
    }
