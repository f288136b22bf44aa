"""SiLU as a module: transformers makes one for every call, where a kernel computes it itself.

It is of a class of its own, or of torch's. Somebody may have put something over the forward of either, before or since.
"""

from __future__ import annotations

import sys

from torch import nn

CLASS = getattr(sys.modules.get("transformers.activations"), "SiLUActivation", nn.SiLU)
FORWARD, FORWARD_OF_TORCH = (
    cls.forward if getattr(cls.forward, "__globals__", None) is vars(sys.modules[cls.__module__]) else None
    for cls in (CLASS, nn.SiLU)
)
