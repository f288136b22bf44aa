"""SiLU as a module: transformers makes one for every call, where a kernel computes it itself, unless somebody sees it.

It is of a class of its own, or of torch's. Somebody may have put something over the forward of either, before or since.
"""

from __future__ import annotations

import sys

from torch import nn
from torch.nn.modules import module

from .modules import CALL

_CLASS = getattr(sys.modules.get("transformers.activations"), "SiLUActivation", nn.SiLU)
_CLASS_FORWARD, _TORCH_FORWARD = (
    cls.forward if getattr(cls.forward, "__globals__", None) is vars(sys.modules[cls.__module__]) else None
    for cls in (_CLASS, nn.SiLU)
)


def is_seen() -> bool:
    """Tell whether somebody would see SiLU called, or has replaced what it computes."""
    return bool(
        _CLASS.forward is not _CLASS_FORWARD
        or nn.SiLU.forward is not _TORCH_FORWARD
        or _CLASS.__call__ is not CALL
        or nn.SiLU.__call__ is not CALL
        or module._global_forward_hooks
        or module._global_forward_pre_hooks
        or module._global_backward_hooks
        or module._global_backward_pre_hooks
    )
