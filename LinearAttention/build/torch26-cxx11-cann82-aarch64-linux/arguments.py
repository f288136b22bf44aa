"""What all functions here ask of the tensors that they are given."""

from __future__ import annotations

import torch
from torch import Tensor


def check_tensors(**tensors: Tensor | None) -> None:
    """Raise unless all tensors, by their names as arguments, are floating point and on one device."""
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
    if len({tensor.device for tensor in given.values()}) > 1:
        found = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(f"all tensors must be on one device, got {found}")


def narrowed(x: Tensor | None) -> Tensor | None:
    """Return what a node takes in the place of a tensor: the NPU has no cast to float64, which its gradient needs."""
    return x.float() if x is not None and x.dtype is torch.float64 and x.device.type == "npu" else x
