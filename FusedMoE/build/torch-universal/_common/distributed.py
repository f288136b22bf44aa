"""Whether tensors are DTensors. For those the operators here have no rules, but the same formula in torch has."""

from __future__ import annotations

import torch
from torch import Tensor

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor

    _DISTRIBUTED: tuple[type, ...] = (DTensor,)
else:
    _DISTRIBUTED = ()


def is_distributed(*tensors: Tensor | None) -> bool:
    """Tell whether one of the tensors is spread over a mesh of devices."""
    for tensor in tensors:  # noqa: SIM110 - a generator takes longer, and every forward asks
        if type(tensor) is not Tensor and isinstance(tensor, _DISTRIBUTED):
            return True
    return False
