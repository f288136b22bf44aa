"""Results of calls with no tokens: they stay part of autograd's graph, as the results of any other call do."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def empty_result(*tensors: Tensor | None, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor without elements that is computed from all of the given ones: each has a gradient, of zeros."""
    parts = [tensor.flatten()[:0].to(dtype) for tensor in tensors if tensor is not None]
    return torch.cat(parts).view(*shape)
