"""The demo: tiny models, or a checkpoint, on an NPU with kernels swapped in, against their originals on the CPU."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

# transformers, torch_npu and its C++ report what is none of a reader's business here
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import softnpu  # isort: skip  before torch

from rich.console import Console
from rich.progress import track
from transformers import AutoConfig
from transformers.utils import logging

import kernels_ext_npu
from kernels_ext_npu.demo import result_tables, tiny_models
from kernels_ext_npu.demo.model_comparison import compare
from kernels_ext_npu.environment import RefusedError
from kernels_ext_npu.machine import description
from kernels_ext_npu.model_configs import TINY

STEPS = 10


def show(console: Console, checkpoint: Path | None = None) -> bool:
    """Show the tiny models, or a checkpoint, and return whether everything agreed.

    Raises:
        RefusedError: the checkpoint cannot be loaded, or generates no text.
        UnsupportedEnvironmentError: kernels cannot be swapped in on this machine.
    """
    logging.disable_progress_bar()
    kernels_ext_npu.register()
    console.print(result_tables.machine(description.describe()))
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if checkpoint is not None:
            _check(checkpoint)
            results[checkpoint.name] = compare(checkpoint, steps=0)
        for name in track(() if checkpoint else TINY, "models", console=console, transient=True):
            tiny_models.save(name, Path(folder) / name)
            results[name] = compare(Path(folder) / name, STEPS, name in tiny_models.IN_GRAPHS)
    for name, result in results.items():
        console.print(f"\n[bold]{name}[/]")
        console.print(result.report)
    console.print("\nSwapped:")
    console.print(result_tables.swaps(results))
    if softnpu.is_software():
        console.print("\nCalls of a forward, and before the swap; host waits in it and in a training step:")
        console.print(result_tables.calls(results))
    console.print("\nLargest differences from the original on the CPU in float32, and of ten losses:")
    console.print(result_tables.agreement(results))
    if softnpu.is_software():
        console.print("\nThe software device computed this, no card.")
    return all(result.agrees() for result in results.values())


def _check(checkpoint: Path) -> None:
    if not (checkpoint / "config.json").is_file():
        raise RefusedError(f"{checkpoint} is no checkpoint: a folder with config.json and weights is expected")
    try:
        config = AutoConfig.from_pretrained(checkpoint, local_files_only=True)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{checkpoint}: {error}") from error
    if tiny_models.loader(config) is None:
        raise RefusedError(
            f"{checkpoint} holds a {config.model_type}: the demo runs models that generate text, with or without images"
        )
