"""Tell whether a graph is being captured: then nothing is taken that was made of a tensor before, or kept for later."""

from __future__ import annotations

import torch


def capturing() -> bool:
    """Tell whether what is launched now becomes part of a graph (``torch.npu.graph``), and runs when it is replayed."""
    if torch.compiler.is_compiling():
        return False
    ask = getattr(getattr(torch, "npu", None), "is_current_stream_capturing", None)
    return ask is not None and ask()
