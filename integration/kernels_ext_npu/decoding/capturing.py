"""What all ways to decode in graphs share: the name of their class, and the error where a model cannot be captured."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

GRAPHS = "NPUGraph"  # the class of graphs in torch.npu; as the backend of a CompileConfig it asks for them


class CaptureError(RuntimeError):
    """A model's forward cannot be captured into a graph; the message says which part of it, and why."""


def place(error: BaseException) -> str:
    """Say where a model is at: the innermost line outside of torch and what is below it."""
    npu = torch.get_device_module("npu")
    below = {Path(torch.__file__).parent, Path(npu.__file__).parent.parent}
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not any(Path(f.filename).is_relative_to(folder) for folder in below)]
    named = [f for f in outside if "softnpu" not in Path(f.filename).parts] or outside or frames
    return f"{Path(named[-1].filename).name}, line {named[-1].lineno}, {named[-1].name}"
