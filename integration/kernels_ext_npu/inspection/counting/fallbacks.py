"""Operators of torch for which torch_npu has no kernel: the device runs a loop over others, fake tensors only one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload


def fallback(operator: OpOverload) -> Callable[..., Tensor] | None:
    """Return the loop that runs in the place of an operator; None where the operator runs itself.

    The host waits once in it, for the sizes of the groups.
    """
    if operator is not torch.ops.aten._grouped_mm.default:
        return None
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_grouped_mm", "PrivateUse1")
    return None if has_kernel else grouped_mm


def grouped_mm(
    self: Tensor, mat2: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: object = None
) -> Tensor:
    """Multiply group by group, as ``_grouped_mm_fallback`` of ATen/native/GroupedMMUtils.h does.

    ``[T, K]`` and ``[G, K, N]`` make ``[T, N]``; ``[G, M, K]`` and ``[K, T]`` make ``[M, T]``; ``[M, T]`` and
    ``[T, N]`` make ``[G, M, N]``. The T rows or columns lie in G groups, here of one size: fake tensors do not tell
    where they end.
    """
    if offs is None:
        return torch.bmm(self, mat2)
    groups = offs.numel()
    if mat2.dim() == 3:  # rows of the one side in groups, a matrix of the other for each
        out = self.new_empty(self.shape[0], mat2.shape[2])
        left, right, outs = _split(self, groups, 0), mat2, _split(out, groups, 0)
    elif self.dim() == 3:
        out = self.new_empty(self.shape[1], mat2.shape[1])
        left, right, outs = self, _split(mat2, groups, 1), _split(out, groups, 1)
    else:  # the sums that are products go over groups
        out = self.new_empty(groups, self.shape[0], mat2.shape[1])
        left, right, outs = _split(self, groups, 1), _split(mat2, groups, 0), out
    for one, other, target in zip(left, right, outs):
        torch.mm(one, other, out=target)
    return out


def _split(tensor: Tensor, groups: int, dim: int) -> Any:
    """Split a dimension into groups as evenly as can be: the first ones are larger by one."""
    size, larger = divmod(tensor.shape[dim], groups)
    return tensor.split([size + (group < larger) for group in range(groups)], dim)
