"""Autocast, which would round what products take, and a state between two tokens."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def in_float32(x: Tensor) -> AbstractContextManager:
    """Keep what is computed as it is written, where ``x`` is."""
    kind = x.device.type
    is_rounding = not x.is_meta and torch.is_autocast_enabled(kind)  # which knows no meta device
    return torch.autocast(kind, enabled=False) if is_rounding else nullcontext()
