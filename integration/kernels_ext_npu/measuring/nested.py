"""Tensors in values of any nesting."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors(values: Any) -> list[Tensor]:
    """Return all tensors in some values, however they are nested."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
