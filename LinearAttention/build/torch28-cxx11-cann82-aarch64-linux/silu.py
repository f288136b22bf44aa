"""SiLU as a module: transformers makes one for every call, where a kernel computes it itself.

Somebody may have put something over its forward or its call, before or since.
"""

from __future__ import annotations

import sys

from torch import nn

CALL = nn.Module._wrapped_call_impl  # torch's own
CLASS = getattr(sys.modules.get("transformers.activations"), "SiLUActivation", nn.SiLU)  # torch's up to 4.57
FORWARD, FORWARD_OF_TORCH = (
    cls.forward if getattr(cls.forward, "__globals__", None) is vars(sys.modules[cls.__module__]) else None
    for cls in (CLASS, nn.SiLU)
)
