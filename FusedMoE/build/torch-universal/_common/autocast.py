"""Autocast, which torch knows for some devices only: the meta device has none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return what autocast casts to where ``x`` is; None where it casts nothing."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if not x.is_meta and torch.is_autocast_enabled(kind) else None


def without_autocast(x: Tensor) -> AbstractContextManager:
    """Keep what is computed as it is written, where ``x`` is."""
    return nullcontext() if autocast_dtype(x) is None else torch.autocast(x.device.type, enabled=False)
