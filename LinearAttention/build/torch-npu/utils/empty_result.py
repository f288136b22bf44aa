"""Results of no tokens, in the graph of autograd as those of any others are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_of(*tensors: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without elements that is computed of all that are given: each has a gradient, of zeros."""
    parts = [tensor.flatten()[:0].to(dtype) for tensor in tensors if tensor is not None]
    return torch.cat(parts).view(*shape)
