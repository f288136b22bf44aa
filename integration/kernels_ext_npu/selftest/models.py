"""Whole tiny models on the device with kernels, against their originals on the host: those of the demo."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import torch

import kernels_ext_npu
import softnpu
from kernels_ext_npu.demo import models, results, run
from kernels_ext_npu.selftest import waits
from kernels_ext_npu.selftest.comparing import Difference


def compare(name: str, source: str) -> dict[str, Any]:
    """Run a model of the demo, in float32, and return what a report says of it.

    Args:
        name: the name in the demo.
        source: where the kernels come from, as register() takes it.
    """
    kernels_ext_npu.register(source=source)
    try:
        with tempfile.TemporaryDirectory() as folder:
            models.save(name, Path(folder))
            torch.manual_seed(0)
            original = run.load(Path(folder))
            made = models.inputs(original.config)
            expected = run.logits(original, made)
            run.train(original, made)
            gradients = [parameter.grad for parameter in original.parameters()]
            model = run.load(Path(folder), device_map="npu", use_kernels=True)
        return _compared(model, models.on("npu", made), expected, gradients)
    finally:
        kernels_ext_npu.unregister()
        gc.collect()


def _compared(
    model: Any, made: models.Inputs, expected: torch.Tensor, gradients: list[torch.Tensor | None]
) -> dict[str, Any]:
    swapped = sum(row.swapped for row in kernels_ext_npu.report(model))
    logits = run.logits(model, made)
    apart = ((logits.cpu() - expected).abs().max() / expected.abs().max().clamp(min=1)).item()
    with waits.counted() as of_a_forward:
        run.logits(model, made)
    run.train(model, made)
    gradient = run.gradient_difference(model, gradients)
    with waits.counted() as of_a_step:
        run.train(model, made)
    found = Difference(apart, gradient)
    return {
        "forward": found.forward,
        "backward": found.backward,
        "tolerance": results.TOLERANCE[softnpu.is_software()],
        "agrees": found.largest <= results.TOLERANCE[softnpu.is_software()] and swapped > 0,
        "swapped": swapped,
        "waits": [of_a_forward.number, of_a_step.number],
    }
