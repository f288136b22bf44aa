"""What the kernel for lists of experts has to say about a block that it serves."""

from __future__ import annotations

import sys

from torch import nn

from kernels_ext_npu.swapping.classes import awaits_weights
from kernels_ext_npu.swapping.forwards import kernel_forward

_LAYERS = ("SparseMoEBlock.forward", "GatedMoEBlock.forward")


def remark(module: nn.Module) -> str | None:
    """Why the experts of a swapped block are computed one after the other; None if they are not, or it has none."""
    forward = kernel_forward(module)
    if forward is None or forward.__qualname__ not in _LAYERS or awaits_weights():
        return None
    package, _, _ = forward.__module__.partition(".")
    reason = sys.modules[f"{package}.blocks"].unfit(module)
    return reason and f"expert by expert, since {reason}"
