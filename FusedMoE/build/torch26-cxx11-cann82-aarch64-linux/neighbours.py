"""Tensors that lie one behind the other in memory, and are used as one without a copy."""

from __future__ import annotations

import torch
from torch import Tensor


def are_neighbours(a: Tensor, b: Tensor) -> bool:
    """Tell whether ``b`` lies directly behind ``a`` in one storage, both contiguous."""
    return (
        a.untyped_storage()._cdata == b.untyped_storage()._cdata
        and a.storage_offset() + a.numel() == b.storage_offset()
        and a.is_contiguous()
        and b.is_contiguous()
    )


def as_one(a: Tensor, b: Tensor) -> Tensor:
    """View two neighbours, ``[A, ...]`` and ``[B, ...]``, as one tensor ``[A + B, ...]``."""
    return a.as_strided((a.shape[0] + b.shape[0], *a.shape[1:]), a.stride(), a.storage_offset())


def joined(a: Tensor, b: Tensor) -> Tensor:
    """Return what were neighbours in a forward as one tensor, with a copy if they are none any more.

    A tensor that was saved for the backward is the parameter as it is then, wherever it has been moved since.
    """
    return as_one(a, b) if are_neighbours(a, b) else torch.cat((a, b))
