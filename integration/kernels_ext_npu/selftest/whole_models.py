"""Whole tiny models on the device with kernels, against their originals on the host: those of the demo."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import kernels_ext_npu
import softnpu
from kernels_ext_npu.demo import model_comparison, tiny_models
from kernels_ext_npu.measuring.distance import OF_MODELS, models_agree


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
            found = model_comparison.compare(Path(folder), steps=0)
    finally:
        kernels_ext_npu.unregister()
        gc.collect()
    swapped = sum(row.swapped for row in found.report)
    return {
        "forward": found.logits,
        "backward": found.gradient,
        "tolerance": OF_MODELS[softnpu.is_software()],
        "agrees": models_agree(found.logits, found.gradient) and swapped > 0,
        "swapped": swapped,
        "waits": list(found.waits),
    }
