"""What a plain linear layer is: torch's own forward, with weights that are numbers."""

from __future__ import annotations

from torch import nn
from torch._subclasses import FakeTensor
from torch.nn.modules import linear

# of a weight that the kernels multiply with
PLAIN = (nn.Parameter, FakeTensor)
# torch's own: somebody may have put another in its place, before or since
FORWARD = nn.Linear.forward if getattr(nn.Linear.forward, "__globals__", None) is vars(linear) else None


def name_of(cls: type) -> str:
    """Return the full name of a class."""
    return f"{cls.__module__}.{cls.__qualname__}"
