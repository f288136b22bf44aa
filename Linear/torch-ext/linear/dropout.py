"""Dropout inside a node of autograd: what is kept of it is its mask, with which its input is multiplied again.

``torch.nn.functional.dropout`` ends in the same operator, and draws the same numbers: op-plugin,
op_plugin/ops/opapi/NativeDropoutKernelNpuOpApi.cpp, where ``native_dropout`` is ``_npu_dropout``.
"""

from __future__ import annotations

import torch
from torch import Tensor


def dropout_with_mask(x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Return ``x / (1 - p)`` where an element is kept and zero elsewhere, and the mask that says which are kept."""
    return torch.native_dropout(x, p, True)


def apply_dropout_mask(x: Tensor, mask: Tensor, p: float) -> Tensor:
    """Return ``x / (1 - p)`` where a mask keeps an element and zero elsewhere: a dropout again, or its gradient."""
    return torch.ops.aten.native_dropout_backward(x, mask, 1 / (1 - p))
