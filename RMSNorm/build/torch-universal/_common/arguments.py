"""What functions ask of the tensors that they are given, what they make of float64, and of no elements."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensors(**tensors: Tensor | None) -> None:
    """Raise unless all tensors, by their names as arguments, are floating point and on one device."""
    device = None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floating point, got {tensor.dtype}")
        if device is not None and tensor.device != device:
            found = ", ".join(f"{n} on {t.device}" for n, t in tensors.items() if t is not None)
            raise ValueError(f"all tensors must be on one device, got {found}")
        device = tensor.device


def narrowed(x: Tensor | None) -> Tensor | None:
    """Return what a node takes in the place of a tensor: the NPU has no cast to float64, which its gradient needs."""
    return x.float() if x is not None and x.dtype is torch.float64 and x.device.type == "npu" else x


def empty_result(*tensors: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without elements that is computed from all of the given ones: each has a gradient, of zeros."""
    parts = [tensor.flatten()[:0].to(dtype) for tensor in tensors if tensor is not None]
    return torch.cat(parts).view(*shape)
