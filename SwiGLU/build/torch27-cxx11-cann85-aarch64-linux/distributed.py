"""Whether tensors are DTensors. For those the operators here have no rules, but the same formula in torch has."""

from __future__ import annotations

import torch
from torch import Tensor

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor

    _DISTRIBUTED: tuple[type, ...] = (DTensor,)
else:
    _DISTRIBUTED = ()


def is_distributed(tensor: Tensor) -> bool:
    """Whether it is spread over a mesh of devices."""
    return isinstance(tensor, _DISTRIBUTED)
